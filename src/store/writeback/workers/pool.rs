//! Threads for work that blocks: started when there is more work than threads, up to a limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;

use super::job::fenced;

/// Queued pieces of work. More than callers ever have in flight.
pub(super) const QUEUE: usize = 512;

/// For buffers on the heap and system calls; 64 threads of the usual 2 MiB would be 128 MiB.
pub(super) const STACK_BYTES: usize = 256 << 10;

/// A piece of work.
pub(super) type Work = Box<dyn FnOnce() + Send>;

struct State {
    /// None once stopped.
    queue: Option<(Sender<Work>, Receiver<Work>)>,
    threads: Vec<JoinHandle<()>>,
}

/// A group of threads.
pub(super) struct Pool {
    name: &'static str,
    most: usize,
    state: Mutex<State>,
    /// Pieces queued or running.
    pending: Arc<AtomicUsize>,
}

impl Pool {
    pub(super) fn new(name: &'static str, most: usize) -> Pool {
        let state = State { queue: Some(bounded(QUEUE)), threads: Vec::new() };
        Pool { name, most, state: Mutex::new(state), pending: Arc::default() }
    }

    /// Runs `work` on a thread of the pool; right here if it is stopped or has no thread and gets
    /// none. A panic of it is logged.
    pub(super) fn run(&self, work: Work) {
        let pending = self.pending.fetch_add(1, SeqCst) + 1;
        let sender = self.sender(pending);
        // The sender is a clone: a full queue is waited for without the lock.
        let refused = match sender {
            Some(sender) => sender.send(work).err().map(|error| error.into_inner()),
            None => Some(work),
        };
        if let Some(work) = refused {
            run_fenced(work);
            self.pending.fetch_sub(1, SeqCst);
        }
    }

    /// Where to queue `pending` pieces, with a further thread if they need one.
    fn sender(&self, pending: usize) -> Option<Sender<Work>> {
        let mut state = self.state.lock();
        let (sender, receiver) = state.queue.as_ref()?;
        let (sender, receiver) = (sender.clone(), receiver.clone());
        let count = state.threads.len();
        if count < pending.min(self.most) {
            let done = self.pending.clone();
            let started = thread::Builder::new()
                .name(format!("{}-{count}", self.name))
                .stack_size(STACK_BYTES)
                .spawn(move || serve(&receiver, &done));
            match started {
                Ok(thread) => state.threads.push(thread),
                // Those that are there do it, later.
                Err(error) if count > 0 => log::warn!("no further {} thread: {error}", self.name),
                Err(_) => return None,
            }
        }
        Some(sender)
    }

    /// Finishes what is queued and ends the threads.
    pub(super) fn stop(&self) {
        let mut state = self.state.lock();
        state.queue = None;
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        join(threads);
    }
}

/// Joins threads; not the calling one, which a last reference may have made stop its own pool.
pub(super) fn join(threads: Vec<JoinHandle<()>>) {
    for thread in threads {
        if thread.thread().id() != thread::current().id() {
            // Their work is fenced: a panic of the loop itself has nobody to go to.
            let _ = thread.join();
        }
    }
}

fn serve(queue: &Receiver<Work>, pending: &AtomicUsize) {
    // Ends when the last sender is gone and the queue is empty.
    while let Ok(work) = queue.recv() {
        run_fenced(work);
        pending.fetch_sub(1, SeqCst);
    }
}

fn run_fenced(work: Work) {
    fenced("a call", work).unwrap_or_else(|error| log::error!("{error}"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn threads_start_when_needed_up_to_the_limit() {
        let pool = Pool::new("test", 3);
        let threads = |pool: &Pool| pool.state.lock().threads.len();
        assert_eq!(threads(&pool), 0);
        let (finished, wait) = mpsc::channel();
        let mut gates = Vec::new();
        for turn in 1..=5 {
            let (gate, open) = mpsc::channel::<()>();
            gates.push(gate);
            let finished = finished.clone();
            pool.run(Box::new(move || {
                let _ = open.recv();
                finished.send(turn).unwrap();
            }));
            assert_eq!(threads(&pool), turn.min(3));
        }
        drop(gates);
        pool.stop();
        assert_eq!(wait.try_iter().count(), 5);
    }

    #[test]
    fn a_panic_ends_no_thread_and_a_stopped_pool_runs_inline() {
        let pool = Pool::new("test", 1);
        pool.run(Box::new(|| panic!("as intended")));
        let (sent, got) = mpsc::channel();
        let again = sent.clone();
        pool.run(Box::new(move || sent.send(thread::current().id()).unwrap()));
        assert_ne!(got.recv().unwrap(), thread::current().id());
        pool.stop();
        pool.run(Box::new(move || again.send(thread::current().id()).unwrap()));
        assert_eq!(got.try_recv().unwrap(), thread::current().id());
    }
}
