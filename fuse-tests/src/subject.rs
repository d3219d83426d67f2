//! What the differential test of overlay mounts looks at: the product's overlay, or a stand-in
//! that `OVERLAY_STAND_IN` names, by which the test itself is tried.
//!
//! - `plain`: a copy of the lower tree, without any mount;
//! - `host`: the product over a copy, without an upper directory;
//! - `overlayfs`: the kernel's overlay filesystem (root only).

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::mount::UnmountFlags;

use crate::cleanup::{mount_at, unmount_path};
use crate::mount::Mount;
use crate::report;
use crate::tools::{run, sh, wait_for};
use crate::treegen::Can;
use crate::writeback::try_product;

/// What is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `bcachefs-fuse mount --upper=UPPER LOWER MNT`.
    Overlay,
    /// A plain directory.
    Plain,
    /// `bcachefs-fuse mount COPY MNT`.
    Host,
    /// The kernel's overlay filesystem.
    Overlayfs,
}

impl Kind {
    /// The one asked for: the product unless `OVERLAY_STAND_IN` names another.
    pub fn asked() -> Kind {
        match env::var("OVERLAY_STAND_IN").as_deref() {
            Err(_) | Ok("") => Kind::Overlay,
            Ok("plain") => Kind::Plain,
            Ok("host") => Kind::Host,
            Ok("overlayfs") => Kind::Overlayfs,
            Ok(other) => panic!("OVERLAY_STAND_IN={other}: plain, host or overlayfs"),
        }
    }

    /// Whether it can be had here; if not the running test is reported as skipped.
    pub fn is_there(self) -> bool {
        match self {
            Kind::Plain => true,
            Kind::Host => report::have_fuse(),
            Kind::Overlayfs => report::have_root("a mount of the kernel's overlay filesystem"),
            Kind::Overlay => {
                if !report::have_fuse() {
                    return false;
                }
                let help = try_product(&["mount", "--help"]);
                let known = String::from_utf8_lossy(&help.stdout).contains("--upper");
                if !known {
                    report::skip("no overlay in this binary: mount --help knows no --upper");
                }
                known
            }
        }
    }

    /// Takes from `can` what this one is known not to do as a plain directory does.
    pub fn limit(self, can: &mut Can) {
        if self == Kind::Overlayfs {
            // A file whose bytes are copied up after its name gets a new time.
            (can.marks, can.directory_links, can.times) = (false, false, false);
        }
    }

    /// Whether it works on the lower tree itself, and not on a copy.
    pub fn is_overlay(self) -> bool {
        matches!(self, Kind::Overlay | Kind::Overlayfs)
    }
}

/// A copy with everything: owners, times, attributes, hard links, holes.
pub fn copy(from: &Path, to: &Path) {
    run("cp", &["-a".as_ref(), "--".as_ref(), from.as_os_str(), to.as_os_str()]);
}

/// Options of the product's mount that `OVERLAY_OPTIONS` adds, "cache_mode=writethrough".
fn asked_options() -> Option<String> {
    env::var("OVERLAY_OPTIONS").ok().filter(|options| !options.is_empty())
}

/// A tree under test; its mount is gone when dropped.
#[derive(Debug)]
pub struct Subject {
    kind: Kind,
    lower: PathBuf,
    base: PathBuf,
    path: PathBuf,
    mount: Option<Mount>,
}

impl Subject {
    /// Makes it over `lower`, with all it needs in the directory `base`.
    pub fn start(kind: Kind, lower: &Path, base: &Path, limit: Duration) -> Option<Subject> {
        let make = |name: &str| {
            let path = base.join(name);
            fs::create_dir(&path).expect("mkdir");
            path
        };
        let mut path = make("mnt");
        let lower = if kind.is_overlay() {
            lower.to_owned()
        } else {
            make("under");
            copy(lower, &base.join("under/tree"));
            // The state of the host mode shows in the links and times of its root: one level up.
            base.join(if kind == Kind::Host { "under" } else { "under/tree" })
        };
        let mut mount = None;
        match kind {
            Kind::Plain => path = lower.clone(),
            Kind::Overlayfs => {
                make("work");
                // Its root is that of the upper directory, whatever the lower one is like.
                copy(&lower, &base.join("upper"));
                let clear = "find upper -mindepth 1 -delete && touch -r lower upper";
                sh(base, clear);
            }
            Kind::Host | Kind::Overlay => {
                let mut builder = Mount::builder("overlay-diff").source(&lower).default_mode();
                if let Some(options) = asked_options() {
                    builder = builder.option(&options);
                }
                if kind == Kind::Overlay {
                    let upper = make("upper");
                    builder = builder.argument(&format!("--upper={}", upper.display()));
                }
                mount = Some(builder.onto(&path).limit(limit).start()?);
            }
        }
        let base = base.to_owned();
        let mut subject = Subject { kind, lower, base, path, mount };
        subject.mount();
        Some(subject)
    }

    /// Where the tree is.
    pub fn path(&self) -> PathBuf {
        if self.kind == Kind::Host { self.path.join("tree") } else { self.path.clone() }
    }

    /// What the daemon of the product said.
    pub fn log(&self) -> String {
        self.mount.as_ref().map(Mount::log).unwrap_or_default()
    }

    /// Mounts the stand-in that is no mount of the product.
    fn mount(&mut self) {
        if self.kind != Kind::Overlayfs {
            return;
        }
        let target = self.path.as_os_str();
        let at = |name: &str| self.base.join(name).display().to_string();
        let (lower, upper, work) = (self.lower.display(), at("upper"), at("work"));
        let options = format!(
            "lowerdir={lower},upperdir={upper},workdir={work},\
                 redirect_dir=on,index=on,metacopy=on"
        );
        let words = ["-t", "overlay", "overlay", "-o", &options];
        let words = words.iter().map(AsRef::as_ref).chain([target]).collect::<Vec<_>>();
        run("mount", &words);
    }

    fn unmount(&mut self) {
        let gone = || unmount_path(&self.path, UnmountFlags::empty()).ok();
        let gone = wait_for(Duration::from_secs(5), gone).is_some();
        if !gone {
            let _ = unmount_path(&self.path, UnmountFlags::DETACH);
        }
        assert!(gone || std::thread::panicking(), "{} stayed busy", self.path.display());
    }

    /// Unmounts in the ordinary way and mounts again.
    pub fn remount(&mut self) {
        if let Some(mount) = &mut self.mount {
            mount.remount();
        } else if self.kind != Kind::Plain {
            self.unmount();
            self.mount();
        }
    }

    /// kill -9 of the daemon, and a mount again; where there is no daemon an ordinary remount.
    pub fn crash(&mut self) {
        if let Some(mount) = &mut self.mount {
            mount.kill();
            mount.start_again();
            return;
        }
        self.remount();
    }

    /// Ends it: the daemon must leave with 0 and have said nothing of a panic.
    pub fn end(mut self) {
        drop(self.mount.take());
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        if self.kind == Kind::Overlayfs && mount_at(&self.path).is_some() {
            self.unmount();
        }
    }
}
