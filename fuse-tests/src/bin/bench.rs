//! `make bench`: the speed table. `bench --quick` for a smoke run, `bench NAME...` for the lines
//! whose names begin so, `bench --list`.

use std::process::ExitCode;

use fuse_tests::bench::lines::{ALL, Env, Line};
use fuse_tests::bench::report::{Row, head, save};
use fuse_tests::bench::{Res, build_release, run, target_dir};

fn missing() -> Vec<&'static str> {
    let there = |tool: &str| run(std::process::Command::new(tool).arg("--version")).is_ok();
    ["fio", "bindfs"].into_iter().filter(|tool| !there(tool)).collect()
}

/// The table as it grows; the names of lines that could not be measured.
fn measure(lines: &[&Line], env: &Env) -> (Vec<Row>, Vec<&'static str>) {
    let (mut rows, mut failed) = (Vec::new(), Vec::new());
    println!("{}", head());
    for line in lines {
        match (line.run)(env) {
            Ok(measured) => {
                measured.iter().for_each(|row| println!("{}", row.line()));
                rows.extend(measured);
            }
            Err(error) => {
                println!("{:<36} FAILED: {error}", line.name);
                failed.push(line.name);
            }
        }
    }
    (rows, failed)
}

fn bench() -> Res<ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let quick = args.iter().any(|arg| arg == "--quick");
    if args.iter().any(|arg| arg == "--list") {
        ALL.iter().for_each(|line| println!("{:<10} {}", line.name, line.what));
        return Ok(ExitCode::SUCCESS);
    }
    let names: Vec<&String> = args.iter().filter(|arg| !arg.starts_with("--")).collect();
    let chosen = |line: &&Line| names.is_empty() || names.iter().any(|n| line.name.starts_with(*n));
    let lines: Vec<&Line> = ALL.iter().filter(chosen).collect();
    if lines.is_empty() || args.iter().any(|arg| arg.starts_with("--") && arg != "--quick") {
        return Err("usage: bench [--quick] [--list] [NAME...]".into());
    }
    let missing = missing();
    if !missing.is_empty() {
        let tools = missing.join(" ");
        return Err(format!("missing: {tools} (Debian: apt-get install {tools})").into());
    }
    build_release()?;
    let env = Env::new(quick)?;
    let (rows, failed) = measure(&lines, &env);
    let directory = target_dir()?.join("bench");
    save(&rows, quick, &directory)?;
    println!("{}/bench.json, bench.svg", directory.display());
    let below = rows.iter().filter(|row| !row.ok()).count();
    if quick {
        println!("a smoke run: the figures mean nothing");
    }
    println!("{} rows, {below} below, {} not measured", rows.len(), failed.len());
    let good = failed.is_empty() && (quick || below == 0);
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn main() -> ExitCode {
    bench().unwrap_or_else(|error| {
        eprintln!("bench: {error}");
        ExitCode::from(2)
    })
}
