//! The server and the client against a fake filesystem.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::*;
use crate::config::{CacheMode, Config, DaemonConfig, MountConfig, StoreConfig, Tunables};
use crate::control::client::{Client, Flush, open_for_tests};
use crate::error::Kind;
use crate::stats::{BlockInfo, Counters, DeviceSnapshot, FlushProgress, Snapshot};

struct Fake {
    tunables: Tunables,
    trace: Mutex<Option<PathBuf>>,
    /// Whether the rest is left, and how often a flush was waited for in vain.
    leave: AtomicBool,
    given_up: AtomicUsize,
}

impl Mounted for Fake {
    fn snapshot(&self, unit: Option<u32>) -> Snapshot {
        let total = Counters { ops: 3, hits: 2, misses: 1, ..Counters::default() };
        let device = |unit| DeviceSnapshot {
            unit,
            path: format!("{unit}.img"),
            resident_blocks: 1,
            open: false,
            counters: total,
            writeback: None,
        };
        let units: Vec<u32> = unit.map_or(vec![1, 2], |unit| vec![unit]);
        let devices = units.into_iter().map(device).collect();
        Snapshot {
            block_size: 4096,
            capacity_blocks: 9,
            resident_blocks: 2,
            total,
            devices,
            writeback: None,
        }
    }

    fn resolve(&self, below: &Path) -> Result<Option<u32>> {
        match below.to_str() {
            Some("2.img") => Ok(Some(2)),
            Some("dir") => Ok(None),
            _ => Err(Error::new(Kind::NotFound, "resolve", "")),
        }
    }

    fn blocks(&self, _unit: Option<u32>) -> Vec<BlockInfo> {
        let block = |unit, block| BlockInfo { unit, block, age_ms: 0, count: 0 };
        vec![block(2, 1), block(1, 9), block(1, 3)]
    }

    fn tunables(&self) -> &Tunables {
        &self.tunables
    }

    fn set_cache_mode(&self, mode: CacheMode) {
        self.tunables.set_cache_mode(mode);
    }

    fn start_trace(&self, file: &Path) -> Result<()> {
        *self.trace.lock() = Some(file.to_path_buf());
        Ok(())
    }

    fn stop_trace(&self) {
        *self.trace.lock() = None;
    }

    fn open_files(&self) -> usize {
        1
    }

    fn flush(
        &self,
        below: Option<&Path>,
        tell: &mut dyn FnMut(&FlushProgress) -> bool,
    ) -> Result<FlushProgress> {
        let total = match below.and_then(Path::to_str) {
            None => 3,
            Some("endless.img") => u64::MAX,
            Some("2.img") => 1,
            _ => return Err(Error::new(Kind::NotFound, "flush", "")),
        };
        for done in 0..total {
            let progress = FlushProgress {
                done_bytes: done,
                left_bytes: total - done,
                ..FlushProgress::default()
            };
            if !tell(&progress) {
                self.given_up.fetch_add(1, SeqCst);
                return Ok(progress);
            }
        }
        let stuck = vec![("1.img".to_string(), "No space left on device".to_string())];
        Ok(FlushProgress { done_bytes: total, depth: 64, stuck, ..FlushProgress::default() })
    }

    fn leave_rest(&self, leave: bool) {
        self.leave.store(leave, SeqCst);
    }
}

fn fake() -> Arc<Fake> {
    Arc::new(Fake {
        tunables: Tunables::new(&StoreConfig::default()),
        trace: Mutex::new(None),
        leave: AtomicBool::new(false),
        given_up: AtomicUsize::new(0),
    })
}

fn info(allow_other: bool) -> MountInfo {
    let config = Config {
        mount: MountConfig {
            source: "/srv".into(),
            upper: None,
            lowers: Vec::new(),
            mountpoint: "/mnt".into(),
            read_only: false,
            allow_other,
            attr_timeout: Duration::from_secs(1),
            fsname: "/srv".into(),
            threads: 16,
            flags: Vec::new(),
            test_panic: None,
        },
        store: StoreConfig::default(),
        daemon: DaemonConfig::default(),
    };
    MountInfo { config, device: (0, 99), shutdown: Box::new(|| ()) }
}

/// A connection as the mounter's, or as another user's.
fn connection(allow_other: bool, stranger: bool) -> (Arc<Fake>, Connection) {
    let fake = fake();
    let mut shared = Shared::new(fake.clone(), info(allow_other));
    // The tests may run as root, who is everybody's owner: the mounter is 1000 here.
    shared.uid = 1000;
    let uid = if stranger { 1001 } else { 1000 };
    shared.owners.store(1, SeqCst);
    shared.guests.store(1, SeqCst);
    (fake, Connection { shared: Arc::new(shared), uid, tracing: false })
}

fn ask(connection: &mut Connection, line: &str) -> String {
    serde_json::to_string(&connection.answer(line.as_bytes(), &mut |_| true)).unwrap()
}

#[test]
fn a_file_narrows_and_a_directory_does_not() {
    let (_, mut peer) = connection(false, false);
    for (below, unit) in [("null", "null"), ("\"2.img\"", "2"), ("\"dir\"", "null")] {
        let line = format!("{{\"schema\":1,\"op\":\"stat\",\"below\":{below}}}");
        let reply = ask(&mut peer, &line);
        assert!(reply.contains(&format!("\"unit\":{unit},\"open_files\":1")), "{reply}");
    }
    for below in ["../etc", "/etc", "missing"] {
        let line = format!("{{\"schema\":1,\"op\":\"stat\",\"below\":\"{below}\"}}");
        assert!(ask(&mut peer, &line).starts_with("{\"reply\":\"error\""));
    }
    let blocks = ask(&mut peer, r#"{"schema":1,"op":"blocks","below":null}"#);
    let order: Vec<_> =
        blocks.match_indices("\"block\":").map(|(at, _)| &blocks[at + 8..at + 9]).collect();
    assert_eq!(order, ["3", "9", "1"]);
}

#[test]
fn strangers_see_what_they_may_enter_and_change_nothing() {
    let reading = [
        r#"{"schema":1,"op":"hello"}"#,
        r#"{"schema":1,"op":"stat","below":null}"#,
        r#"{"schema":1,"op":"blocks","below":null}"#,
        r#"{"schema":1,"op":"errors"}"#,
    ];
    let changing = [
        r#"{"schema":1,"op":"settings"}"#,
        r#"{"schema":1,"op":"set","assignments":[["expire","1s"]]}"#,
        r#"{"schema":1,"op":"trace","file":"/tmp/t"}"#,
        r#"{"schema":1,"op":"flush","below":null}"#,
        r#"{"schema":1,"op":"leave","leave":true}"#,
        r#"{"schema":1,"op":"shutdown"}"#,
    ];
    for (allow_other, stranger) in [(false, false), (true, false), (true, true), (false, true)] {
        let (fake, mut peer) = connection(allow_other, stranger);
        for line in reading {
            let refused = ask(&mut peer, line).contains("not permitted");
            assert_eq!(refused, stranger && !allow_other, "{line}");
        }
        for line in changing {
            let refused = ask(&mut peer, line).contains("not permitted");
            assert_eq!(refused, stranger, "{line}");
        }
        assert_eq!(fake.tunables.expire_ms() == 0, stranger);
    }
}

#[test]
fn set_changes_all_or_nothing() {
    let (fake, mut peer) = connection(false, false);
    let mut set = |list: &str| {
        ask(&mut peer, &format!("{{\"schema\":1,\"op\":\"set\",\"assignments\":{list}}}"))
    };
    let reply = set(r#"[["expire","2s"],["cache-mode","none"],["bypass","1G"]]"#);
    assert!(reply.contains("cache too small"), "{reply}");
    assert_eq!(fake.tunables.cache_mode(), CacheMode::Writethrough);
    assert_eq!(fake.tunables.expire_ms(), 0);
    let reply = set(r#"[["threads","4"]]"#);
    assert!(reply.contains("not changeable on a live mount"), "{reply}");
    let reply = set(r#"[["expire","3s"],["cache_mode","writeback"]]"#);
    assert!(reply.contains("mounted without a journal") && reply.contains("/mnt"), "{reply}");
    assert_eq!(fake.tunables.expire_ms(), 0);
    for (bad, wanted) in [
        (r#"["writeback_percent","101"]"#, "from 0 to 100"),
        (r#"["journal_delay","0"]"#, "from 1ms to 60s"),
        (r#"["journal_delay_ms","1s"]"#, "from 1 to 60000"),
        (r#"["writeback_running","maybe"]"#, "give yes or no"),
        (r#"["writeback_delay","soon"]"#, "30s or 500ms"),
    ] {
        let reply = set(&format!("[[\"expire\",\"3s\"],{bad}]"));
        assert!(reply.contains("bad value") && reply.contains(wanted), "{reply}");
        assert_eq!(fake.tunables.expire_ms(), 0);
    }
    let all = r#"[["expire","2s"],["cache-mode","none"],["bypass","1M"],["readahead","0"],
                  ["sequential_cutoff","8M"],["writeback-percent","20"],["writeback_delay","5s"],
                  ["writeback_running","0"],["journal_delay_ms","250"]]"#;
    assert_eq!(set(&all.replace('\n', " ")), "{\"reply\":\"done\"}");
    let tunables = &fake.tunables;
    assert_eq!((tunables.bypass(), tunables.readahead()), (1 << 20, 0));
    assert_eq!((tunables.sequential_cutoff(), tunables.expire_ms()), (8 << 20, 2000));
    assert_eq!(tunables.cache_mode(), CacheMode::None);
    assert_eq!((tunables.writeback_percent(), tunables.writeback_delay_ms()), (20, 5000));
    assert_eq!((tunables.writeback_running(), tunables.journal_delay_ms()), (false, 250));
    let settings = ask(&mut peer, r#"{"schema":1,"op":"settings"}"#);
    assert!(settings.contains(r#"["bypass","1M"]"#) && settings.contains(r#"["cache","256M"]"#));
}

#[test]
fn a_recording_ends_with_its_connection_and_is_the_only_one() {
    let (fake, mut peer) = connection(false, false);
    let mut second = Connection { shared: peer.shared.clone(), uid: 1000, tracing: false };
    peer.shared.owners.store(2, SeqCst);
    let start = r#"{"schema":1,"op":"trace","file":"/tmp/t"}"#;
    assert!(ask(&mut peer, &start.replace("/tmp/t", "/mnt/t")).contains("wait for itself"));
    assert!(ask(&mut peer, &start.replace("/tmp/t", "t")).contains("cannot record"));
    assert_eq!(ask(&mut peer, start), "{\"reply\":\"done\"}");
    assert!(ask(&mut second, start).contains("a recording runs"));
    assert_eq!(fake.trace.lock().as_deref(), Some(Path::new("/tmp/t")));
    drop(peer);
    assert_eq!(*fake.trace.lock(), None);
    assert_eq!(ask(&mut second, start), "{\"reply\":\"done\"}");
    assert_eq!(second.shared.owners.load(SeqCst), 1);
}

#[test]
fn another_schema_or_rubbish_is_answered_clearly() {
    let (_, mut peer) = connection(false, false);
    for line in [r#"{"schema":2,"op":"hello"}"#, "rubbish", r#"{"schema":1,"op":"dance"}"#] {
        assert!(ask(&mut peer, line).contains("request not understood"), "{line}");
    }
}

#[test]
fn over_a_real_socket() {
    let scratch = tempfile::tempdir().unwrap();
    // Left by a daemon that was killed.
    drop(UnixListener::bind(scratch.path().join("0-99.sock")).unwrap());
    let server = spawn_in(scratch.path(), fake(), info(false)).unwrap();
    let path = server.path().to_path_buf();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);

    let mut client = open_for_tests(&path).unwrap();
    let facts = client.hello().unwrap();
    assert_eq!((facts.device.as_str(), facts.pid), ("0:99", std::process::id()));
    let refusal = client.ask(Ask::Stat { below: Some(Name::Text("x".into())) }).unwrap_err();
    assert_eq!(refusal.place, "x");
    assert!(matches!(client.ask(Ask::Stat { below: None }), Ok(Reply::Stat(_))));

    // A line without an end is cut off; the server lives on.
    let mut long = UnixStream::connect(&path).unwrap();
    let _ = long.write_all(&vec![b'x'; 2 * MAX_REQUEST as usize]);
    assert_eq!(long.read(&mut [0; 1]).unwrap_or(0), 0);
    assert!(client.hello().is_ok());

    drop(server);
    assert!(!path.exists());
    assert!(open_for_tests(&path).is_err());
}

#[test]
fn a_flush_tells_how_far_it_is_and_ends_with_its_client() {
    let scratch = tempfile::tempdir().unwrap();
    let fake = fake();
    let server = spawn_in(scratch.path(), fake.clone(), info(false)).unwrap();
    let client = || open_for_tests(server.path()).unwrap();
    let file = |name: &str| Some(Name::Text(name.into()));
    let mut seen = Vec::new();
    let end = client().flush(None, &mut |progress| {
        seen.push(progress.done_bytes);
        true
    });
    let Ok(Flush::Done(end)) = end else { panic!("{end:?}") };
    assert_eq!((seen, end.done_bytes, end.depth), (vec![0, 1, 2], 3, 64));
    assert_eq!(end.stuck[0].1, "No space left on device");
    let one = client().flush(file("2.img"), &mut |_| true);
    assert!(matches!(one, Ok(Flush::Done(one)) if one.done_bytes == 1));
    for (name, what) in [("x", "flush: NotFound"), ("../x", "not a path below the mountpoint")] {
        let refusal = client().flush(file(name), &mut |_| true).unwrap_err();
        assert_eq!((refusal.what.as_str(), refusal.place.as_str()), (what, name));
    }
    // Nobody listens any more: the waiting inside the daemon ends.
    let stopped = client().flush(file("endless.img"), &mut |progress| progress.done_bytes < 5);
    assert!(matches!(stopped, Ok(Flush::Stopped(at)) if at.done_bytes == 5));
    while fake.given_up.load(SeqCst) == 0 {
        thread::yield_now();
    }
    assert!(matches!(client().ask(Ask::Leave { leave: true }), Ok(Reply::Done)));
    assert!(fake.leave.load(SeqCst));
}

#[test]
fn a_socket_that_is_not_ours_is_named() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("0-1.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let answer = |text: &'static str| {
        let listener = listener.try_clone().unwrap();
        let thread = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 100]);
            stream.write_all(text.as_bytes()).unwrap();
        });
        let mut client: Client = open_for_tests(&path).unwrap();
        let refusal = client.hello().unwrap_err();
        thread.join().unwrap();
        refusal.what
    };
    assert_eq!(answer("220 mail\n"), "not a control socket of ours: its answer is not understood");
    assert_eq!(
        answer("{\"schema\":2,\"reply\":\"done\"}\n"),
        "not a control socket of ours: it speaks schema 2, not 1"
    );
    assert!(answer("").contains("closed the connection"));
}
