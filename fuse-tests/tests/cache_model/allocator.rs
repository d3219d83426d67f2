//! An allocator that counts, per thread, what malloc really takes.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// (bytes this thread has allocated and not freed, the most it ever had).
    pub static HELD: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// Counts what malloc really takes for a request, per thread.
struct Counting;

fn cost(layout: Layout) -> usize {
    (layout.size() + 8).next_multiple_of(16).max(32)
}

// SAFETY: every call goes to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let (held, most) = HELD.get();
        let held = held.wrapping_add(cost(layout));
        HELD.set((held, most.max(held)));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let (held, most) = HELD.get();
        let held = held.wrapping_add(cost(layout));
        HELD.set((held, most.max(held)));
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        let (held, most) = HELD.get();
        HELD.set((held.saturating_sub(cost(layout)), most));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;
