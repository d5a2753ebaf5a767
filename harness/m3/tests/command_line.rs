//! The contract of the binary: exit codes, one-line messages, pipes.

use std::fs::File;
use std::io::Read;
use std::process::{Command, Output, Stdio};

fn m3(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_m3"));
    command
        .args(args)
        .env_remove("M3_DEVICE")
        .env_remove("M3_SEED")
        .env_remove("RUST_BACKTRACE");
    command
}

fn ended(args: &[&str]) -> (Option<i32>, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = m3(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

/// Exit code, nothing on standard output, one line on standard error that begins and contains as told.
fn refused(args: &[&str], code: i32, parts: &[&str]) {
    let (status, stdout, stderr) = ended(args);
    assert_eq!(
        (status, stdout.as_str()),
        (Some(code), ""),
        "{args:?}: {stderr}"
    );
    assert!(
        stderr.starts_with("error: ") && stderr.ends_with('\n'),
        "{args:?}: {stderr}"
    );
    assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{args:?}: {stderr}");
    }
}

#[test]
fn bad_usage_ends_with_2_and_says_what_was_meant() {
    refused(&[], 2, &["requires a subcommand", "--help"]);
    refused(&["trian"], 2, &["'trian'", "'train'"]);
    refused(&["train", "--step", "3"], 2, &["'--step'", "'--steps'"]);
    refused(&["train", "--steps", "0"], 2, &["--steps", "0"]);
    refused(&["train", "--device", "tpu"], 2, &["tpu", "cuda:N"]);
    refused(&["train", "--seed", "-1"], 2, &["-1"]);
    refused(
        &["train", "--objective", "dpo"],
        2,
        &["dpo", "grpo, sft, pretrain"],
    );
    refused(&["gate", "--threads", "0"], 2, &["--threads", "from 1"]);
    refused(&["op"], 2, &["<NAME>"]);
    refused(
        &["op", "msa_atention"],
        2,
        &["\"msa_atention\"", "did you mean msa_attention?"],
    );
    refused(&["op", "two\nlines"], 2, &["two\\nlines"]);
}

#[test]
fn an_absent_gpu_ends_with_121() {
    refused(
        &["train", "--device", "cuda:3"],
        121,
        &["no CUDA device", "--device cpu"],
    );
}

#[test]
fn a_filter_that_matches_nothing_ends_with_4() {
    refused(&["list", "conv"], 4, &["\"conv\""]);
    refused(&["list", "--cases", "conv"], 4, &["\"conv\""]);
    refused(&["gate", "conv"], 4, &["\"conv\"", "m3 list --cases"]);
}

#[test]
fn help_shows_every_verb_and_exit_code() {
    let (status, stdout, stderr) = ended(&["--help"]);
    assert_eq!((status, stderr.as_str()), (Some(0), ""));
    for part in [
        "train",
        "list",
        "op",
        "doctor",
        "120  golden missing or stale",
        "4  nothing selected",
    ] {
        assert!(stdout.contains(part), "{stdout}");
    }
}

#[test]
fn an_operation_shows_its_file_in_every_room_and_its_gates() {
    let (status, stdout, _) = ended(&["op", "msa_attention"]);
    assert_eq!(status, Some(0));
    for part in [
        "reference/m3-spec/src/ops/msa_attention.rs\n",
        "reference/m3-reference/src/ops/msa_attention.rs\n",
        "kernels/src/cpu/msa_attention.rs\n",
        "harness/gates/msa_attention.toml\n",
        "msa_attention.backward.err_ratio",
        "err_ratio <= 2.0   analytic, ",
    ] {
        assert!(stdout.contains(part), "{stdout}");
    }
}

#[test]
fn every_operation_is_listed() {
    let (status, stdout, _) = ended(&["list"]);
    assert_eq!(
        (status, stdout.lines().count()),
        (Some(0), m3_spec::ops::all().count())
    );
}

#[test]
fn a_machine_without_a_gpu_is_in_order() {
    let (status, stdout, stderr) = ended(&["doctor"]);
    assert_eq!((status, stderr.as_str()), (Some(0), ""));
    for name in ["kernels", "threads", "cuda"] {
        assert!(
            stdout.lines().any(|line| line.starts_with(name)),
            "{stdout}"
        );
    }
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let mut child = m3(&["op", "msa_attention"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut stderr = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut stderr)
        .unwrap();
    assert_eq!(
        (child.wait().unwrap().code(), stderr.as_str()),
        (Some(0), "")
    );
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_under_standard_output_ends_with_110() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let output = m3(&["list"])
        .stdout(full)
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(110), "{stderr}");
    assert!(stderr.starts_with("error: standard output: "), "{stderr}");
}

#[test]
fn completions_name_every_verb() {
    let (status, stdout, stderr) = ended(&["completions", "bash"]);
    assert_eq!((status, stderr.as_str()), (Some(0), ""));
    for verb in [
        "train", "logprobs", "generate", "gate", "list", "op", "doctor",
    ] {
        assert!(stdout.contains(verb), "{verb}");
    }
}

#[test]
fn cases_are_listed_under_the_names_that_gate_takes() {
    let (status, stdout, _) = ended(&["list", "--cases", "msa_attention::bf16"]);
    assert_eq!(status, Some(0));
    assert!(
        stdout
            .lines()
            .all(|line| line.starts_with("msa_attention::bf16/")),
        "{stdout}"
    );
}
