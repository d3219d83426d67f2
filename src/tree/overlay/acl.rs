//! POSIX ACLs on rows, as filesystems of the kernel keep them: the mode is in sync with the access
//! ACL, and new inodes inherit a directory's default one.
//!
//! The form of the attribute is the kernel's (linux/posix_acl_xattr.h): version 2, then entries of
//! tag, permissions and id, little-endian. No state.

use rustix::io::Errno;

use crate::error::{Error, Result};

/// The attribute of an inode's own ACL.
pub(super) const ACCESS: &str = "system.posix_acl_access";
/// The attribute of the one that a directory's new inodes get.
pub(super) const DEFAULT: &str = "system.posix_acl_default";

const VERSION: u32 = 2;
const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
const HEADER_BYTES: usize = 4;
const ENTRY_BYTES: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    tag: u16,
    perm: u16,
    id: u32,
}

/// An access control list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Acl(Vec<Entry>);

fn bad() -> Error {
    Error::os("setxattr", Errno::INVAL)
}

impl Acl {
    /// From the attribute's value; EINVAL if it is none.
    pub(super) fn parse(bytes: &[u8]) -> Result<Acl> {
        let (head, rest) = bytes.split_first_chunk::<HEADER_BYTES>().ok_or_else(bad)?;
        if u32::from_le_bytes(*head) != VERSION || rest.len() % ENTRY_BYTES != 0 {
            return Err(bad());
        }
        let entry = |bytes: &[u8]| -> Option<Entry> {
            let [a, b, c, d, id @ ..] = bytes else { return None };
            let id = u32::from_le_bytes(id.try_into().ok()?);
            let (tag, perm) = (u16::from_le_bytes([*a, *b]), u16::from_le_bytes([*c, *d]));
            Some(Entry { tag, perm, id })
        };
        let entries: Option<Vec<Entry>> = rest.chunks(ENTRY_BYTES).map(entry).collect();
        let acl = Acl(entries.ok_or_else(bad)?);
        if acl.is_valid() { Ok(acl) } else { Err(bad()) }
    }

    /// One entry for each of owner, group and others; a mask if anybody else is named.
    fn is_valid(&self) -> bool {
        let count = |tag| self.0.iter().filter(|entry| entry.tag == tag).count();
        let known = [USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER];
        let named = count(USER) + count(GROUP) > 0;
        self.0.iter().all(|entry| known.contains(&entry.tag) && entry.perm <= 7)
            && [USER_OBJ, GROUP_OBJ, OTHER].iter().all(|tag| count(*tag) == 1)
            && (count(MASK) == 1 || (count(MASK) == 0 && !named))
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        for entry in &self.0 {
            bytes.extend_from_slice(&entry.tag.to_le_bytes());
            bytes.extend_from_slice(&entry.perm.to_le_bytes());
            bytes.extend_from_slice(&entry.id.to_le_bytes());
        }
        bytes
    }

    /// Whether it says no more than a mode does.
    pub(super) fn is_a_mode(&self) -> bool {
        self.0.len() == 3
    }

    fn perm(&self, tag: u16) -> Option<u32> {
        self.0.iter().find(|entry| entry.tag == tag).map(|entry| u32::from(entry.perm))
    }

    /// The permission bits that stand for it.
    pub(super) fn mode(&self) -> u32 {
        let group = self.perm(MASK).or_else(|| self.perm(GROUP_OBJ)).unwrap_or(0);
        self.perm(USER_OBJ).unwrap_or(0) << 6 | group << 3 | self.perm(OTHER).unwrap_or(0)
    }

    /// What shows as the group's bits.
    fn group_tag(&self) -> u16 {
        if self.perm(MASK).is_some() { MASK } else { GROUP_OBJ }
    }

    /// chmod(2) of an inode that has it.
    pub(super) fn with_mode(mut self, mode: u32) -> Acl {
        let group = self.group_tag();
        for entry in &mut self.0 {
            let bits = match entry.tag {
                USER_OBJ => mode >> 6,
                OTHER => mode,
                tag if tag == group => mode >> 3,
                _ => continue,
            };
            entry.perm = (bits & 7) as u16;
        }
        self
    }

    /// What a new inode of this mode gets of a default ACL.
    pub(super) fn inherited(self, mode: u32) -> Acl {
        let most = self.mode() & mode;
        self.with_mode(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acl(entries: &[(u16, u16)]) -> Acl {
        Acl(entries.iter().map(|&(tag, perm)| Entry { tag, perm, id: u32::from(tag) }).collect())
    }

    #[test]
    fn modes_and_acls_agree() {
        let plain = acl(&[(USER_OBJ, 6), (GROUP_OBJ, 4), (OTHER, 0)]);
        assert_eq!((plain.mode(), plain.is_a_mode()), (0o640, true));
        let named = acl(&[(USER_OBJ, 7), (USER, 7), (GROUP_OBJ, 5), (MASK, 6), (OTHER, 1)]);
        assert_eq!((named.mode(), named.is_a_mode()), (0o761, false));
        let changed = named.clone().with_mode(0o604);
        assert_eq!((changed.mode(), changed.perm(GROUP_OBJ)), (0o604, Some(5)));
        assert_eq!(named.clone().inherited(0o640).mode(), 0o640);
        assert_eq!(Acl::parse(&named.bytes()).unwrap(), named);
    }

    #[test]
    fn what_is_no_acl_is_refused() {
        let named = acl(&[(USER_OBJ, 7), (USER, 7), (GROUP_OBJ, 5), (OTHER, 1)]);
        assert!(Acl::parse(&named.bytes()).is_err(), "named users need a mask");
        let plain = acl(&[(USER_OBJ, 6), (GROUP_OBJ, 4), (OTHER, 0)]).bytes();
        assert!(Acl::parse(&plain[..plain.len() - 1]).is_err());
        assert!(Acl::parse(&plain[..12]).is_err() && Acl::parse(&[]).is_err());
        let mut other = plain;
        other[0] = 1;
        assert!(Acl::parse(&other).is_err());
    }
}
