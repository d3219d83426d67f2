//! zfs-fuse as a child of ours, its pools, and the tree that is put on them.
//!
//! Its paths are fixed (/run/zfs, /run/lock, /var/lib/zfs, /etc/zfs): `hide_the_system` puts empty
//! filesystems there, in the private mount namespace that `raidz` runs in, so that no zfs-fuse of
//! the machine is met and nothing of ours is left.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::{Res, run};

const SOCKET: &str = "/run/zfs/zfs_socket";
const PATIENCE: Duration = Duration::from_secs(20);

/// The tree: one kernel and its modules.
const KERNEL_BYTES: usize = 24 << 20;
/// Number of modules.
pub const MODULES: usize = 600;

/// Empty filesystems where zfs-fuse, zpool and our daemon keep their state. Only for a private
/// mount namespace.
pub fn hide_the_system() -> Res<()> {
    for directory in ["/run", "/var/lib/zfs", "/etc/zfs"] {
        run(Command::new("mount").args(["-t", "tmpfs", "none", directory]))?;
    }
    Ok(fs::create_dir("/run/lock")?)
}

/// The daemon; killed when dropped.
pub struct Zfs {
    child: Child,
}

impl Zfs {
    /// Starts it with as little cache of its own as it can be told: what hits, hits in ours.
    pub fn start(log: &Path) -> Res<Zfs> {
        let mut command = Command::new("zfs-fuse");
        command.args(["--no-daemon", "--no-kstat-mount", "--disable-block-cache"]);
        command.args(["--vdev-cache-size", "0", "--max-arc-size", "16"]);
        command.args(["--pidfile", "/run/zfs-fuse.pid"]);
        let log = File::create(log)?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let mut zfs = Zfs { child: command.spawn().map_err(|e| format!("zfs-fuse: {e}"))? };
        let start = Instant::now();
        while !Path::new(SOCKET).exists() {
            if let Some(status) = zfs.child.try_wait()? {
                return Err(format!("zfs-fuse ended at once: {status}").into());
            }
            if start.elapsed() > PATIENCE {
                return Err("zfs-fuse made no socket".into());
            }
            sleep(Duration::from_millis(20));
        }
        Ok(zfs)
    }
}

impl Drop for Zfs {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Image files as block devices: only those does zfs-fuse open O_DIRECT (what it promises for
/// `--disable-block-cache`); files it reads through the kernel's page cache, which would answer in
/// our cache's place.
pub struct Loops {
    devices: Vec<(PathBuf, File)>,
}

impl Loops {
    /// A loop device for each image in `mount`, with direct I/O, linked by the image's name in
    /// `links`. They are detached when the last descriptor goes: ours, so even if we are killed.
    pub fn attach(mount: &Path, images: &[String], links: &Path) -> Res<Loops> {
        let _ = fs::remove_dir_all(links);
        fs::create_dir(links)?;
        let mut loops = Loops { devices: Vec::new() };
        for image in images {
            let mut command = Command::new("losetup");
            command.args(["--direct-io=on", "--find", "--show"]).arg(mount.join(image));
            let device = PathBuf::from(run(&mut command)?.trim_end());
            let open = File::open(&device);
            // While it is open this only says "when it is closed".
            run(Command::new("losetup").arg("-d").arg(&device))?;
            std::os::unix::fs::symlink(&device, links.join(image))?;
            loops.devices.push((device, open?));
        }
        Ok(loops)
    }

    /// Waits until they let go of the images.
    pub fn detach(self) -> Res<()> {
        let backing = |device: &Path| -> Option<PathBuf> {
            Some(Path::new("/sys/block").join(device.file_name()?).join("loop/backing_file"))
        };
        for (device, file) in self.devices {
            drop(file);
            let start = Instant::now();
            while backing(&device).is_some_and(|path| path.exists()) {
                if start.elapsed() > PATIENCE {
                    return Err(format!("{} stays attached", device.display()).into());
                }
                sleep(Duration::from_millis(5));
            }
        }
        Ok(())
    }
}

/// A pool of block devices in a directory.
pub struct Pool {
    /// Its name.
    pub name: &'static str,
    /// "raidz1", "raidz2".
    pub level: &'static str,
    /// Number of members, disk0.img and so on.
    pub members: usize,
    /// Where its filesystem is mounted.
    pub mountpoint: PathBuf,
}

impl Pool {
    /// Names of the members' images and devices.
    pub fn images(&self) -> Vec<String> {
        (0..self.members).map(|n| format!("disk{n}.img")).collect()
    }

    /// Makes it of the devices in `directory`.
    pub fn create(&self, directory: &Path) -> Res<()> {
        let mut command = Command::new("zpool");
        command.args(["create", "-O", "atime=off", "-m"]).arg(&self.mountpoint);
        command.args([self.name, self.level]);
        command.args(self.images().iter().map(|image| directory.join(image)));
        run(&mut command).map(drop)
    }

    /// Lets go of it; its filesystem is unmounted.
    pub fn export(&self) -> Res<()> {
        run(Command::new("zpool").args(["export", self.name])).map(drop)
    }

    /// Finds it in `directory` again and mounts it.
    pub fn import(&self, directory: &Path) -> Res<()> {
        run(Command::new("zpool").arg("import").arg("-d").arg(directory).arg(self.name)).map(drop)
    }
}

/// Pseudo-random bytes of file `number`: the same in every run.
fn contents(number: usize) -> Vec<u8> {
    let mut state = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    // Modules: most of a few KiB to 64 KiB, some of 192.
    let size = match number {
        0 => KERNEL_BYTES,
        n if n % 8 == 0 => 192 << 10,
        _ => 4096 + (next() % (96 << 10)) as usize,
    };
    (0..size / 8 + 1).flat_map(|_| next().to_le_bytes()).take(size).collect()
}

fn name(number: usize) -> String {
    match number {
        0 => "kernel".into(),
        n => format!("modules/module-{n:03}.ko"),
    }
}

/// Writes the tree below `root`; its bytes.
pub fn write_tree(root: &Path) -> Res<u64> {
    fs::create_dir(root.join("modules"))?;
    let mut total = 0;
    for number in 0..=MODULES {
        let bytes = contents(number);
        total += bytes.len() as u64;
        fs::write(root.join(name(number)), bytes)?;
    }
    Ok(total)
}

/// Reads the whole tree and compares every byte; the time without the comparing.
pub fn read_tree(root: &Path) -> Res<Duration> {
    let start = Instant::now();
    let mut checking = Duration::ZERO;
    for number in 0..=MODULES {
        let path = root.join(name(number));
        let bytes = fs::read(&path)?;
        let check = Instant::now();
        if bytes != contents(number) {
            return Err(format!("{}: wrong bytes", path.display()).into());
        }
        checking += check.elapsed();
    }
    Ok(start.elapsed() - checking)
}
