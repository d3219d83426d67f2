//! What the mount tests share.
