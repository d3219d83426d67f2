//! Which files are open, and what is remembered of closed ones: their tag, so that their blocks
//! still hit, and their stamp, so that a change behind the mount is noticed at the next open.
//!
//! States of a file: unknown -> open (live) -> closed (known) -> open ... ; known ones are bounded,
//! the least recently closed is forgotten first. A closed file that is dirty stays live, with no
//! handle, until it is clean. Invariant: an identity is live or known, not both.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use lru::LruCache;

use super::Device;
use crate::cache::{Cache, CacheDevice};
use crate::stats::DeviceSnapshot;
use crate::units::{DeviceId, Identity, Stamp};

/// Closed files that are remembered.
const KNOWN_MAX: usize = 65_536;

struct Live {
    device: Arc<Device>,
    handles: usize,
    stamp: Stamp,
    path: PathBuf,
    /// No name is left: the tag dies with the last handle.
    unlinked: bool,
}

struct Known {
    cached: Arc<CacheDevice>,
    stamp: Stamp,
    path: PathBuf,
}

/// What became of a handle.
pub(super) enum Closed {
    /// The device goes on.
    Open,
    /// It was the last one; the file is remembered.
    Known(Arc<Device>),
    /// The file has no name: nothing of it is needed any more.
    Dropped(Arc<Device>),
}

/// See the module.
pub(super) struct Registry {
    live: HashMap<Identity, Live>,
    known: LruCache<Identity, Known>,
    /// Tags that no file has any more, though it is there: nothing of them may be replayed.
    retired: Vec<DeviceId>,
}

impl Registry {
    pub(super) fn new() -> Registry {
        Registry { live: HashMap::new(), known: LruCache::unbounded(), retired: Vec::new() }
    }

    /// Tags to be voided in the journal, with no lock held (J14).
    pub(super) fn take_retired(&mut self) -> Vec<DeviceId> {
        std::mem::take(&mut self.retired)
    }

    fn retire(&mut self, cached: &CacheDevice, cache: &Cache) {
        cache.retire(cached);
        self.retired.push(cached.id);
    }

    /// One more handle of an open file.
    pub(super) fn open_again(&mut self, identity: &Identity) -> Option<Arc<Device>> {
        let live = self.live.get_mut(identity)?;
        live.handles += 1;
        Some(live.device.clone())
    }

    /// Whether somebody else changed an open file that we did not touch; notes the new stamp.
    pub(super) fn changed_while_open(&mut self, identity: &Identity, stamp: Stamp) -> bool {
        match self.live.get_mut(identity) {
            Some(live) if !live.device.is_touched() && live.stamp != stamp => {
                live.stamp = stamp;
                true
            }
            _ => false,
        }
    }

    /// The tag of a closed file whose stamp is still right; another stamp retires the tag.
    pub(super) fn take_unchanged(
        &mut self,
        identity: &Identity,
        stamp: Stamp,
        cache: &Cache,
    ) -> Option<Arc<CacheDevice>> {
        let known = self.known.pop(identity)?;
        if known.stamp == stamp {
            return Some(known.cached);
        }
        self.retire(&known.cached, cache);
        None
    }

    /// The first handle of a file.
    pub(super) fn insert(
        &mut self,
        identity: Identity,
        device: Arc<Device>,
        stamp: Stamp,
        path: PathBuf,
    ) {
        self.live.insert(identity, Live { device, handles: 1, stamp, path, unlinked: false });
    }

    /// A device that recovery found dirty: live without a handle.
    pub(super) fn insert_closed(
        &mut self,
        identity: Identity,
        device: Arc<Device>,
        stamp: Stamp,
        path: PathBuf,
    ) {
        self.live.insert(identity, Live { device, handles: 0, stamp, path, unlinked: false });
    }

    /// Drops a handle. With the last one the device is returned, to be closed unlocked, unless it
    /// is dirty and has a name.
    pub(super) fn close(
        &mut self,
        identity: &Identity,
        stamp: Option<Stamp>,
        cache: &Cache,
    ) -> Closed {
        let Some(live) = self.live.get_mut(identity) else { return Closed::Open };
        live.stamp = stamp.unwrap_or(live.stamp);
        live.handles = live.handles.saturating_sub(1);
        self.rest(identity, cache)
    }

    /// A device has become clean, and its source looks like this now.
    pub(super) fn settle(
        &mut self,
        identity: &Identity,
        stamp: Option<Stamp>,
        cache: &Cache,
    ) -> Closed {
        let Some(live) = self.live.get_mut(identity) else { return Closed::Open };
        live.stamp = stamp.unwrap_or(live.stamp);
        self.rest(identity, cache)
    }

    fn rest(&mut self, identity: &Identity, cache: &Cache) -> Closed {
        let Some(live) = self.live.get(identity) else { return Closed::Open };
        let stays = live.device.is_dirty.load(SeqCst) && !live.unlinked;
        if live.handles > 0 || stays {
            return Closed::Open;
        }
        let Some(Live { device, stamp, path, unlinked, .. }) = self.live.remove(identity) else {
            return Closed::Open;
        };
        if unlinked {
            cache.retire(device.cached());
            return Closed::Dropped(device);
        }
        let cached = device.cached().clone();
        cached.rest();
        self.known.put(*identity, Known { cached, stamp, path });
        if self.known.len() > KNOWN_MAX
            && let Some((_, oldest)) = self.known.pop_lru()
        {
            self.retire(&oldest.cached, cache);
        }
        Closed::Known(device)
    }

    pub(super) fn live(&self, identity: &Identity) -> Option<Arc<Device>> {
        self.live.get(identity).map(|live| live.device.clone())
    }

    pub(super) fn knows(&self, identity: &Identity) -> bool {
        self.live.contains_key(identity) || self.known.contains(identity)
    }

    pub(super) fn touched(&mut self, identity: &Identity, now: Stamp, set_mtime: bool) {
        let stamp = match self.live.get_mut(identity) {
            Some(live) => &mut live.stamp,
            None => match self.known.peek_mut(identity) {
                Some(known) => &mut known.stamp,
                None => return,
            },
        };
        if stamp.size == now.size && (set_mtime || stamp.mtime == now.mtime) {
            *stamp = now;
        }
    }

    /// The last name is gone; a device without a handle is returned.
    pub(super) fn forget(&mut self, identity: &Identity, cache: &Cache) -> Option<Arc<Device>> {
        if let Some(live) = self.live.get_mut(identity) {
            live.unlinked = true;
            return match self.rest(identity, cache) {
                Closed::Dropped(device) => Some(device),
                _ => None,
            };
        }
        if let Some(known) = self.known.pop(identity) {
            cache.retire(&known.cached);
        }
        None
    }

    pub(super) fn set_path(&mut self, identity: &Identity, path: PathBuf) {
        if let Some(live) = self.live.get_mut(identity) {
            live.path = path;
        } else if let Some(known) = self.known.peek_mut(identity) {
            known.path = path;
        }
    }

    pub(super) fn open_count(&self) -> usize {
        self.live.values().filter(|live| live.handles > 0).count()
    }

    pub(super) fn path(&self, identity: &Identity) -> Option<&PathBuf> {
        self.live.get(identity).map(|live| &live.path)
    }

    /// The tag of a closed file.
    pub(super) fn known(&self, identity: &Identity) -> Option<DeviceId> {
        self.known.peek(identity).map(|known| known.cached.id)
    }

    pub(super) fn unit_of(&self, identity: &Identity) -> Option<u32> {
        let cached = match self.live.get(identity) {
            Some(live) => live.device.cached(),
            None => &self.known.peek(identity)?.cached,
        };
        Some(cached.id.0)
    }

    pub(super) fn snapshots(&self) -> Vec<DeviceSnapshot> {
        let live = self.live.values();
        let live = live.map(|live| (live.device.cached(), &live.path, live.handles > 0));
        let known = self.known.iter().map(|(_, known)| (&known.cached, &known.path, false));
        live.chain(known)
            .map(|(cached, path, open)| DeviceSnapshot {
                unit: cached.id.0,
                path: path.to_string_lossy().into_owned(),
                resident_blocks: cached.resident_blocks(),
                open,
                counters: cached.stats.counters(),
                writeback: None,
            })
            .collect()
    }
}
