//! The `headwise` command: parses the arguments, calls the subcommand, turns its failure into an exit status.
#![forbid(unsafe_code)]

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use headwise_cli::{bench, check, embed, heads, run};

/// Counts what is allocated, for the bench's `extra_bytes`.
#[global_allocator]
static MEMORY: peak_alloc::PeakAlloc = peak_alloc::PeakAlloc;

/// Fast and exact multi-head attention on CPUs.
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Args),
    Embed(embed::Args),
    Heads(heads::Args),
    Bench(bench::Args),
    Check(check::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => args.execute(),
        Command::Embed(args) => args.execute(),
        Command::Heads(args) => args.execute(),
        Command::Bench(args) => args.execute(),
        Command::Check(args) => args.execute(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let _ = writeln!(std::io::stderr(), "headwise: {failure}"); // nowhere left to complain
            ExitCode::from(failure.status)
        }
    }
}
