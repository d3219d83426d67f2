//! The kernel's table of mounts (layer 8): a parser of /proc/self/mountinfo.
//!
//! Reading it touches no filesystem, so it works while a mount is dead or not yet answering.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use crate::error::{OpContext, Result};

/// The type our mounts show in mount(8), findmnt(8) and df(1).
pub const FILESYSTEM_TYPE: &str = "fuse.bcachefs-fuse";

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// The number of the mount in this namespace.
    pub id: u64,
    /// The mount it is mounted on.
    pub parent: u64,
    /// Device number of its files.
    pub major: u32,
    /// Device number of its files.
    pub minor: u32,
    /// The directory of its filesystem that is mounted (not "/" for bind mounts and subvolumes).
    pub root: PathBuf,
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// Options of this mount (ro, nosuid, relatime, ...).
    pub options: String,
    /// Filesystem type.
    pub fstype: String,
    /// First column of mount(8).
    pub source: OsString,
    /// Options of the filesystem (user_id=, allow_other, ...).
    pub super_options: String,
}

impl MountEntry {
    /// Whether this program made it.
    pub fn is_ours(&self) -> bool {
        self.fstype == FILESYSTEM_TYPE
    }

    /// Whether it is any FUSE mount.
    pub fn is_fuse(&self) -> bool {
        self.fstype == "fuse" || self.fstype == "fuseblk" || self.fstype.starts_with("fuse.")
    }

    /// Device number as (major, minor).
    pub fn device(&self) -> (u32, u32) {
        (self.major, self.minor)
    }
}

/// Reads the table of this process.
pub fn read() -> Result<Vec<MountEntry>> {
    let place = "/proc/self/mountinfo";
    let text = std::fs::read(place).op("read").map_err(|error| error.at(place))?;
    Ok(parse(&text))
}

/// Parses the table; lines that are not understood are left out.
pub fn parse(text: &[u8]) -> Vec<MountEntry> {
    text.split(|&byte| byte == b'\n').filter_map(parse_line).collect()
}

/// The mount that a path walk to `mountpoint` ends on: the topmost of those stacked there.
pub fn top_at<'a>(entries: &'a [MountEntry], mountpoint: &Path) -> Option<&'a MountEntry> {
    let mut stack = entries.iter().filter(|entry| entry.mountpoint == mountpoint);
    let covered =
        |id: u64| entries.iter().any(|above| above.parent == id && above.mountpoint == mountpoint);
    stack.rfind(|entry| !covered(entry.id))
}

/// The mount of ours with this device number on this directory, on top or covered.
pub fn find_ours<'a>(
    entries: &'a [MountEntry],
    mountpoint: &Path,
    device: (u32, u32),
) -> Option<&'a MountEntry> {
    entries
        .iter()
        .find(|entry| entry.is_ours() && entry.device() == device && entry.mountpoint == mountpoint)
}

/// The mount that holds `path` (which must be absolute and free of "." and "..").
pub fn holding<'a>(entries: &'a [MountEntry], path: &Path) -> Option<&'a MountEntry> {
    path.ancestors().find_map(|ancestor| top_at(entries, ancestor))
}

/// Where `path` lies inside its filesystem, whatever bind mounts lead there: device number, path.
pub fn origin(entries: &[MountEntry], path: &Path) -> Option<((u32, u32), PathBuf)> {
    let entry = holding(entries, path)?;
    let below = path.strip_prefix(&entry.mountpoint).ok()?;
    // No trailing slash where `below` is empty.
    Some((entry.device(), entry.root.join(below).components().collect()))
}

fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|&byte| byte == b' ').filter(|field| !field.is_empty());
    let id = number(fields.next()?)?;
    let parent = number(fields.next()?)?;
    let device = text(fields.next()?);
    let (major, minor) = device.split_once(':')?;
    let root = PathBuf::from(unescape(fields.next()?));
    let mountpoint = PathBuf::from(unescape(fields.next()?));
    let options = text(fields.next()?);
    // Zero or more optional fields end with a lone hyphen.
    fields.find(|&field| field == b"-")?;
    Some(MountEntry {
        id,
        parent,
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
        root,
        mountpoint,
        options,
        fstype: unescape(fields.next()?).to_string_lossy().into_owned(),
        source: unescape(fields.next().unwrap_or_default()),
        super_options: text(fields.next().unwrap_or_default()),
    })
}

fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(field).into_owned()
}

fn number(field: &[u8]) -> Option<u64> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

/// Undoes the kernel's \ooo escapes of space, tab, newline, backslash and '#'.
fn unescape(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let octal = tail.get(..3).filter(|digits| {
            first == b'\\' && digits[0] < b'4' && digits.iter().all(|d| (b'0'..b'8').contains(d))
        });
        if let Some(digits) = octal {
            bytes.push(digits.iter().fold(0u8, |value, d| (value << 3) | (d - b'0')));
            rest = &tail[3..];
        } else {
            bytes.push(first);
            rest = tail;
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"22 27 0:21 / /proc rw,relatime - proc proc rw\n\
        27 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw,discard\n\
        90 27 0:44 / /srv/a\\040b rw,nosuid - fuse.bcachefs-fuse /srv/x\\134y rw,user_id=0\n\
        91 90 0:45 / /srv/a\\040b ro - tmpfs tmpfs rw\n\
        broken line\n\
        92 27 0:46 / /srv ro - fuse.sshfs \n\
        93 27 254:0 /var/lib /bind rw - ext4 /dev/vda rw\n";

    #[test]
    fn lines_are_parsed_and_unescaped() {
        let table = parse(TABLE);
        assert_eq!(table.len(), 6);
        assert_eq!(table[1].fstype, "ext4");
        assert_eq!((table[1].device(), table[1].id, table[1].parent), ((254, 0), 27, 1));
        assert_eq!(table[2].mountpoint, Path::new("/srv/a b"));
        assert_eq!(table[2].source, "/srv/x\\y");
        assert!(table[2].is_ours() && table[4].is_fuse() && !table[4].is_ours());
    }

    #[test]
    fn the_topmost_of_a_stack_is_found() {
        let table = parse(TABLE);
        assert_eq!(top_at(&table, Path::new("/srv/a b")).map(|entry| entry.id), Some(91));
        assert_eq!(top_at(&table, Path::new("/srv/q")), None);
        assert_eq!(holding(&table, Path::new("/srv/q/r")).map(|entry| entry.id), Some(92));
        assert_eq!(holding(&table, Path::new("/usr")).map(|entry| entry.id), Some(27));
        let below = |path: &str| origin(&table, Path::new(path)).unwrap();
        assert_eq!(below("/bind/x"), ((254, 0), "/var/lib/x".into()));
        assert_eq!(below("/bind"), ((254, 0), "/var/lib".into()));
        assert_eq!(below("/"), ((254, 0), "/".into()));
    }

    #[test]
    fn what_is_no_escape_stays() {
        assert_eq!(unescape(b"a\\9x\\12"), "a\\9x\\12");
        assert_eq!(unescape(b"\\777"), "\\777");
        assert_eq!(unescape(b"\\134\\011"), "\\\t");
    }

    #[test]
    fn our_own_table_can_be_read() {
        assert!(top_at(&read().unwrap(), Path::new("/")).is_some());
    }
}
