//! Extended attributes of a host tree. `security.capability` is answered from memory where it is
//! known to be absent: the kernel asks for it before every write.

use std::ffi::OsStr;

use rustix::io::Errno;

use super::HostTree;
use super::node::{Capability, Node};
use crate::error::{Error, Kind, OpContext, Result};
use crate::sys::path_fd;

const CAPABILITY: &str = "security.capability";

/// Attributes of our own files are not the application's business.
const OURS: &str = "user.bcachefs-fuse.";

fn is_ours(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(OURS.as_bytes())
}

impl HostTree {
    pub(super) fn get_attribute(
        &self,
        node: &Node,
        name: &OsStr,
        value: &mut [u8],
    ) -> Result<usize> {
        if name == CAPABILITY && node.capability() == Capability::Absent {
            return Err(Error::os("getxattr", Errno::NODATA));
        }
        match path_fd::getxattr(&*self.fd(node)?, name, value) {
            Err(Errno::NODATA) if name == CAPABILITY => {
                node.set_capability(Capability::Absent);
                Err(Error::os("getxattr", Errno::NODATA))
            }
            other => other.op("getxattr"),
        }
    }

    pub(super) fn set_attribute(
        &self,
        node: &Node,
        name: &OsStr,
        value: &[u8],
        flags: u32,
    ) -> Result<()> {
        if is_ours(name) {
            return Err(Error::new(Kind::NotPermitted, "setxattr", OURS));
        }
        if name == CAPABILITY {
            node.set_capability(Capability::Unknown);
        }
        path_fd::setxattr(&*self.fd(node)?, name, value, flags).op("setxattr")
    }

    pub(super) fn remove_attribute(&self, node: &Node, name: &OsStr) -> Result<()> {
        if is_ours(name) {
            return Err(Error::new(Kind::NotPermitted, "removexattr", OURS));
        }
        if name == CAPABILITY {
            node.set_capability(Capability::Unknown);
        }
        path_fd::removexattr(&*self.fd(node)?, name).op("removexattr")
    }
}
