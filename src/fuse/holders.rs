//! Who keeps a mount busy (layer 8), from /proc alone: no path below the mount is touched, so it
//! works while the mount does not answer.

use std::path::{Path, PathBuf};
use std::time::Duration;

/// A process that uses a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its number.
    pub pid: u32,
    /// Its name.
    pub command: String,
    /// "open file", "working directory", "mapped file".
    pub what: &'static str,
    /// Which, as that process sees it; empty where this user may not know.
    pub path: PathBuf,
}

/// How long `find` may look. A process that is stuck in execve(2) on a mount that does not answer
/// blocks every reader of its /proc entries.
const PATIENCE: Duration = Duration::from_secs(3);

/// Processes that use the mount with this number or device on this directory, as far as this user
/// may see; itself left out. None: some process could not be looked at within the patience.
pub fn find(id: Option<u64>, device: Option<(u32, u32)>, mountpoint: &Path) -> Option<Vec<Holder>> {
    let (sender, receiver) = crossbeam_channel::bounded(1);
    let mountpoint = mountpoint.to_path_buf();
    let look = move || {
        // Too late: nobody waits any more.
        let _ = sender.send(look_for(id, device, &mountpoint));
    };
    let started = std::thread::Builder::new().name("holders".into()).spawn(look);
    started.ok().and_then(|_| receiver.recv_timeout(PATIENCE).ok())
}

fn look_for(id: Option<u64>, device: Option<(u32, u32)>, mountpoint: &Path) -> Vec<Holder> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let own = std::process::id();
    processes
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|&pid| pid != own)
        .filter_map(|pid| {
            let directory = PathBuf::from(format!("/proc/{pid}"));
            let (what, path) = use_of(&directory, id, device, mountpoint)?;
            let command = std::fs::read_to_string(directory.join("comm")).unwrap_or_default();
            Some(Holder { pid, command: command.trim().to_owned(), what, path })
        })
        .collect()
}

/// "vim (pid 12, open file /mnt/a.img), bash (pid 9, working directory /mnt)", or that nobody can
/// be seen.
pub fn describe(found: Option<&[Holder]>) -> String {
    const SHOWN: usize = 5;
    let Some(holders) = found else {
        return "a process that cannot be looked at now".into();
    };
    if holders.is_empty() {
        return "no process of this user; look with: fuser -vm".into();
    }
    let mut words: Vec<String> = holders
        .iter()
        .take(SHOWN)
        .map(|holder| {
            let path = match holder.path.as_os_str() {
                path if path.is_empty() => String::new(),
                path => format!(" {}", path.display()),
            };
            format!("{} (pid {}, {}{path})", holder.command, holder.pid, holder.what)
        })
        .collect();
    if holders.len() > SHOWN {
        words.push(format!("{} more", holders.len() - SHOWN));
    }
    words.join(", ")
}

fn use_of(
    process: &Path,
    id: Option<u64>,
    device: Option<(u32, u32)>,
    mountpoint: &Path,
) -> Option<(&'static str, PathBuf)> {
    let below = |link: &str| {
        let target = std::fs::read_link(process.join(link)).ok()?;
        target.starts_with(mountpoint).then_some(target)
    };
    let open = open_file(process, id).map(|path| ("open file", path));
    open.or_else(|| below("cwd").map(|path| ("working directory", path)))
        .or_else(|| below("root").map(|path| ("root directory", path)))
        .or_else(|| mapped_file(process, device).map(|path| ("mapped file", path)))
}

fn open_file(process: &Path, id: Option<u64>) -> Option<PathBuf> {
    let (id, files) = (id?, std::fs::read_dir(process.join("fdinfo")).ok()?);
    let file = files.flatten().find(|file| {
        let text = std::fs::read_to_string(file.path()).unwrap_or_default();
        let field = text.lines().find_map(|line| line.strip_prefix("mnt_id:"));
        field.and_then(|value| value.trim().parse().ok()) == Some(id)
    })?;
    // The link is read, never followed: the mount may not answer.
    let link = process.join("fd").join(file.file_name());
    Some(std::fs::read_link(link).unwrap_or_default())
}

fn mapped_file(process: &Path, device: Option<(u32, u32)>) -> Option<PathBuf> {
    let (major, minor) = device?;
    let wanted = format!("{major:02x}:{minor:02x}");
    let maps = std::fs::read(process.join("maps")).unwrap_or_default();
    let maps = String::from_utf8_lossy(&maps);
    maps.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace().skip(3);
        let found = words.next() == Some(wanted.as_str());
        found.then(|| words.skip(1).collect::<Vec<_>>().join(" ").into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_are_described_in_one_line() {
        let path = PathBuf::from("/mnt/a.img");
        let one = Holder { pid: 7, command: "vim".into(), what: "open file", path };
        assert_eq!(describe(Some(std::slice::from_ref(&one))), "vim (pid 7, open file /mnt/a.img)");
        let unknown = Holder { path: PathBuf::new(), ..one.clone() };
        assert_eq!(describe(Some(&[unknown])), "vim (pid 7, open file)");
        assert!(describe(Some(&vec![one; 8])).ends_with(", 3 more"));
    }

    #[test]
    fn a_process_with_an_open_file_is_found() {
        let table = crate::fuse::mountinfo::read().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap();
        let mount = crate::fuse::mountinfo::holding(&table, &path).unwrap();
        let mut child = std::process::Command::new("sleep")
            .arg("30")
            .stdin(std::fs::File::open(&path).unwrap())
            .spawn()
            .unwrap();
        let found = find(Some(mount.id), None, &path).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let holder = found.iter().find(|holder| holder.pid == child.id());
        assert_eq!(holder.map(|holder| &holder.path), Some(&path), "{found:?}");
    }
}
