//! Acting as another user (root only).

use std::process::{Command, Output, Stdio};
use std::thread;

/// Two ids that own nothing on the machine.
pub const ALICE: u32 = 23_001;
/// The other one.
pub const BOB: u32 = 23_002;

/// Runs a shell line as uid and gid `id`, without other groups; returns its exit and output.
pub fn run_as(id: u32, line: &str) -> Output {
    let id = id.to_string();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "sh", "-c", line]);
    command.stdin(Stdio::null()).env("LC_ALL", "C").current_dir("/");
    command.output().expect("setpriv (util-linux)")
}

/// Runs `job` in a thread of its own with these ids and groups, and nothing of root's power.
pub fn as_user<T: Send>(uid: u32, gid: u32, groups: &[u32], job: impl FnOnce() -> T + Send) -> T {
    let become_user = move || {
        // The raw calls change this thread only; libc's would change the whole process.
        // SAFETY: plain integers, and a slice that outlives the call.
        unsafe {
            assert_eq!(libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()), 0);
            assert_eq!(libc::syscall(libc::SYS_setresgid, gid, gid, gid), 0);
            assert_eq!(libc::syscall(libc::SYS_setresuid, uid, uid, uid), 0);
        }
        job()
    };
    let joined = thread::scope(|scope| scope.spawn(become_user).join());
    joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
