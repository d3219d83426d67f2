//! Source directories on filesystems of every kind.

use std::path::{Path, PathBuf};

use rustix::mount::UnmountFlags;

use crate::cleanup::unmount_path;
use crate::paths::Scratch;
use crate::tools::{run, sh};

/// The filesystem below a source directory. All but `Plain` need root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// A directory of the build's own filesystem.
    Plain,
    /// An ext4 image of this many MiB on a loop device.
    Ext4(u32),
    /// An xfs image (at least 300 MiB).
    Xfs(u32),
    /// A btrfs image (at least 110 MiB).
    Btrfs(u32),
    /// A tmpfs of this many MiB.
    Tmpfs(u32),
}

impl Backing {
    /// The backing of a word ("ext4") at the size pjdfstest needs.
    pub fn parse(word: &str) -> Option<Backing> {
        Some(match word {
            "plain" => Backing::Plain,
            "ext4" => Backing::Ext4(256),
            "xfs" => Backing::Xfs(512),
            "btrfs" => Backing::Btrfs(512),
            "tmpfs" => Backing::Tmpfs(256),
            _ => return None,
        })
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Backing::Plain => "plain",
            Backing::Ext4(_) => "ext4",
            Backing::Xfs(_) => "xfs",
            Backing::Btrfs(_) => "btrfs",
            Backing::Tmpfs(_) => "tmpfs",
        }
    }

    /// Whether root is needed.
    pub fn needs_root(self) -> bool {
        self != Backing::Plain
    }

    /// Makes the filesystem inside `scratch` and mounts it.
    pub fn prepare(self, scratch: &Scratch) -> Prepared {
        let root = scratch.path().join("backing");
        std::fs::create_dir(&root).expect("mkdir");
        let mut mounted = Prepared { root, mounted: false };
        let target = mounted.root.to_str().expect("UTF-8").to_owned();
        let image = |mib: u32, mkfs: &str| {
            let image = scratch.path().join("backing.img");
            let name = image.display();
            sh(scratch.path(), &format!("truncate -s {mib}M {name} && {mkfs} {name}"));
            image.to_str().expect("UTF-8").to_owned()
        };
        match self {
            Backing::Plain => return mounted,
            Backing::Ext4(mib) => {
                let image = image(mib, "mkfs.ext4 -q -F -E lazy_itable_init=0 -O ^has_journal");
                run("mount", &["-o", "loop,acl,user_xattr", &image, &target]);
            }
            Backing::Xfs(mib) => {
                let image = image(mib.max(300), "mkfs.xfs -q -f");
                run("mount", &["-o", "loop", &image, &target]);
            }
            Backing::Btrfs(mib) => {
                let image = image(mib.max(110), "mkfs.btrfs -q -f");
                run("mount", &["-o", "loop", &image, &target]);
            }
            Backing::Tmpfs(mib) => {
                let size = format!("size={mib}M");
                run("mount", &["-t", "tmpfs", "-o", &size, "tmpfs", &target]);
            }
        }
        mounted.mounted = true;
        mounted
    }
}

/// A prepared source directory; unmounted when dropped.
#[derive(Debug)]
pub struct Prepared {
    root: PathBuf,
    mounted: bool,
}

impl Prepared {
    /// The directory to mount.
    pub fn root(&self) -> &Path {
        &self.root
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        if !self.mounted {
            return;
        }
        let busy = || unmount_path(&self.root, UnmountFlags::empty()).err().map(|_| ());
        for _ in 0..100 {
            if busy().is_none() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let _ = unmount_path(&self.root, UnmountFlags::DETACH);
        if !std::thread::panicking() {
            panic!("{} stayed busy", self.root.display());
        }
    }
}
