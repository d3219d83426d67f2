//! One fio run as a function.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::{Res, run};

/// What fio is asked to do.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// read, write, randread, randwrite.
    pub rw: &'static str,
    /// Bytes of a request, in fio's words: "4k".
    pub block: &'static str,
    /// O_DIRECT.
    pub direct: bool,
    /// Requests in flight; above 1 through io_uring.
    pub depth: u32,
    /// Processes.
    pub jobs: u32,
    /// Bytes of the file that are used.
    pub size: u64,
    /// How long; None: once over `size`.
    pub seconds: Option<f64>,
}

/// What it measured.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Requests a second.
    pub iops: f64,
    /// Bytes a second.
    pub bytes: f64,
}

/// Runs `job` on `file`.
pub fn fio(file: &Path, job: &Job) -> Res<Outcome> {
    let side = more(&[format!("--filename={}", file.display())], job)?;
    let number = |name: &str| side[name].as_f64().ok_or(format!("fio printed no {name}"));
    Ok(Outcome { iops: number("iops")?, bytes: number("bw_bytes")? })
}

/// Runs `job` with more options, those that name its files among them; what fio's JSON says of
/// the side (reads or writes) that the job has.
pub fn more(options: &[String], job: &Job) -> Res<Value> {
    let mut command = Command::new("fio");
    command.args(["--name=bench", "--output-format=json", "--group_reporting"]);
    // No laying out, no dropping of the kernel's cache, the same offsets in every run.
    command.args(["--fallocate=none", "--invalidate=0", "--randrepeat=1", "--thread"]);
    command.arg(format!("--rw={}", job.rw)).arg(format!("--bs={}", job.block));
    command.arg(format!("--direct={}", u8::from(job.direct)));
    command.arg(format!("--size={}", job.size)).arg(format!("--numjobs={}", job.jobs));
    if job.depth > 1 {
        command.arg("--ioengine=io_uring").arg(format!("--iodepth={}", job.depth));
    } else {
        command.arg("--ioengine=psync");
    }
    if let Some(seconds) = job.seconds {
        command.arg("--time_based").arg(format!("--runtime={}ms", (seconds * 1000.0) as u64));
    }
    let said = run(command.args(options))?;
    // fio may print notes before its JSON.
    let start = said.find('{').ok_or("fio printed no JSON")?;
    let mut parsed: Value = serde_json::from_str(&said[start..])?;
    let result = &mut parsed["jobs"][0];
    if result["error"].as_u64() != Some(0) {
        return Err(format!("fio {}: error {}", options.join(" "), result["error"]).into());
    }
    Ok(result[if job.rw.contains("write") { "write" } else { "read" }].take())
}
