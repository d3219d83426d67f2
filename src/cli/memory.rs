//! The default cache size (layer 9): the smaller of 256M and 1/8 of the memory this process may
//! use. Read once at mount; a size the user typed is never changed.

use std::fs;
use std::path::{Path, PathBuf};

/// The largest default.
const MOST: u64 = 256 << 20;

/// The default of `cache` in bytes for `memory` bytes of memory; whole mebibytes, at least one.
pub fn default_cache(memory: u64) -> u64 {
    (memory / 8).clamp(1 << 20, MOST) & !((1 << 20) - 1)
}

/// RAM, or the limit of this process's control group where that is smaller.
pub fn available() -> u64 {
    let info = rustix::system::sysinfo();
    let ram = (info.totalram as u64).saturating_mul(u64::from(info.mem_unit.max(1)));
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    cgroup_limit(Path::new("/sys/fs/cgroup"), &groups).map_or(ram, |limit| limit.min(ram))
}

/// The smallest memory limit on the way from this process's group (`groups` is
/// /proc/self/cgroup) to the root, of either version. In a container the path may name groups
/// that are not visible here; the walk upward then still finds the container's own.
fn cgroup_limit(root: &Path, groups: &str) -> Option<u64> {
    let mut least: Option<u64> = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let (base, file) = if controllers.is_empty() {
            (root.to_path_buf(), "memory.max")
        } else if controllers.split(',').any(|name| name == "memory") {
            (root.join("memory"), "memory.limit_in_bytes")
        } else {
            continue;
        };
        let mut group: PathBuf = path.trim_start_matches('/').into();
        loop {
            let text = fs::read_to_string(base.join(&group).join(file)).unwrap_or_default();
            // "max" is no limit, and so is version 1's huge number: the caller takes the minimum.
            if let Ok(limit) = text.trim().parse::<u64>() {
                least = Some(least.map_or(limit, |least| least.min(limit)));
            }
            if !group.pop() {
                break;
            }
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eighth_of_memory_up_to_256m() {
        assert_eq!(default_cache(16 << 30), 256 << 20);
        assert_eq!(default_cache(1 << 30), 128 << 20);
        assert_eq!(default_cache((1 << 30) + 4096), 128 << 20);
        assert_eq!(default_cache(0), 1 << 20);
    }

    #[test]
    fn limits_of_both_cgroup_versions() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(cgroup_limit(root.path(), "0::/a/b\n"), None);
        write("a/b/memory.max", "max\n");
        write("a/memory.max", "1048576\n");
        assert_eq!(cgroup_limit(root.path(), "0::/a/b\n"), Some(1 << 20));
        write("memory/memory.limit_in_bytes", "2097152\n");
        let groups = "5:cpu:/x\n4:hugetlb,memory:/docker/abc\n";
        assert_eq!(cgroup_limit(root.path(), groups), Some(2 << 20));
        assert!(available() > 1 << 20);
    }
}
