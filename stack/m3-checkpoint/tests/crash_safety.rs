//! A checkpoint is there whole or not at all, whatever ends its writer.

mod common;

use common::*;
use m3_checkpoint::{Checkpoint, Error, FileDtype, Synthetic, TensorPlan, Writer, synthetic};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

/// Tells a test that it is its own child, and where to work.
const CHILD_DIR: &str = "M3_CHECKPOINT_CHILD_DIR";
const STAGING: &str = ".m3-unfinished";

fn child_dir() -> Option<std::path::PathBuf> {
    std::env::var_os(CHILD_DIR).map(Into::into)
}

/// Runs the test `name` of this binary as a child that works in `dir`, through a shell that first does `before` in `$0`.
fn run_child(name: &str, dir: &Path, shell: &[&str], before: &str) -> Output {
    let script = format!("{before} exec \"$@\"");
    let (program, arguments) = shell.split_first().unwrap();
    Command::new(program)
        .args(arguments)
        .args(["-c", &script])
        .arg(dir)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD_DIR, dir)
        .output()
        .unwrap()
}

fn tensors() -> Vec<TensorPlan> {
    ["a", "b"]
        .map(|name| TensorPlan {
            name: name.into(),
            dtype: FileDtype::F32,
            shape: vec![2],
        })
        .into()
}

fn listing(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = entries
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn line(error: &Error, dir: &Path) -> String {
    let line = error.to_string().replace(dir.to_str().unwrap(), "DIR");
    assert!(!line.contains('\n'), "{line}");
    line
}

#[test]
fn a_writer_that_is_dropped_leaves_nothing() {
    let parent = TempDir::new().unwrap();
    let (fresh, used) = (parent.path().join("fresh"), parent.path().join("used"));
    fs::create_dir(&used).unwrap();
    fs::write(used.join("tokenizer.json"), "{}").unwrap();
    for dir in [&fresh, &used] {
        let mut writer = Writer::create(dir, "{}", &tensors(), 8).unwrap();
        writer.write("a", &[0; 8]).unwrap();
        assert!(listing(dir).contains(&STAGING.to_owned()));
    }
    assert!(!fresh.exists());
    assert_eq!(listing(&used), ["tokenizer.json"]);
}

#[test]
fn a_finished_checkpoint_leaves_no_other_files() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    let mut writer = Writer::create(&dir, "{}", &tensors(), 8).unwrap();
    writer.write("b", &[1; 8]).unwrap();
    writer.write_f32("a", [1.0, 2.0]).unwrap();
    writer.finish().unwrap();
    assert_eq!(
        listing(dir.path()),
        [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            INDEX,
            "tokenizer.json"
        ]
    );
}

#[test]
fn an_existing_checkpoint_is_never_overwritten() {
    for file in [
        "config.json",
        SINGLE,
        INDEX,
        "model-00003-of-00059.safetensors",
    ] {
        let dir = TempDir::new().unwrap();
        fs::write(dir.path().join(file), "older").unwrap();
        let error = synthetic(&dir, &config(), &options()).unwrap_err();
        assert!(!error.is_write());
        assert_eq!(
            line(&error, dir.path()),
            format!(
                "DIR/{file}: already here, and a checkpoint is never overwritten; choose another directory or remove it"
            )
        );
        assert_eq!(listing(dir.path()), [file]);
        assert_eq!(fs::read(dir.path().join(file)).unwrap(), b"older");
    }
}

#[test]
fn two_writers_never_share_a_directory() {
    let dir = TempDir::new().unwrap();
    let mut first = Writer::create(&dir, "{}", &tensors(), 100).unwrap();
    let error = synthetic(&dir, &config(), &options()).unwrap_err();
    assert!(!error.is_write());
    assert_eq!(
        line(&error, dir.path()),
        "DIR: another process is writing here; wait for it or choose another directory"
    );
    for name in ["a", "b"] {
        first.write(name, &[0; 8]).unwrap();
    }
    first.finish().unwrap();
    assert_eq!(listing(dir.path()), ["config.json", SINGLE]);
}

#[test]
fn a_killed_writer_leaves_an_unfinished_directory_that_the_next_one_takes_over() {
    if let Some(dir) = child_dir() {
        let mut writer = Writer::create(dir, "{}", &tensors(), 8).unwrap();
        writer.write("a", &[0; 8]).unwrap();
        // As a kill does, this runs no destructor.
        std::process::exit(9);
    }
    let dir = TempDir::new().unwrap();
    let name = "a_killed_writer_leaves_an_unfinished_directory_that_the_next_one_takes_over";
    let output = run_child(name, dir.path(), &["sh"], "");
    assert_eq!(output.status.code(), Some(9), "{output:?}");
    // Or it was killed between two renames.
    let shard = "model-00001-of-00002.safetensors";
    fs::rename(dir.path().join(STAGING).join(shard), dir.path().join(shard)).unwrap();
    assert_eq!(
        refusal(&dir),
        "DIR: writing this checkpoint never finished (config.json is written last); write it again"
    );
    synthetic(&dir, &config(), &options()).unwrap();
    assert_eq!(listing(dir.path()), ["config.json", SINGLE]);
    Checkpoint::open(&dir).unwrap();
}

#[test]
fn an_unwritable_place_is_a_write_error() {
    let error = synthetic("/dev/null/checkpoint", &config(), &options()).unwrap_err();
    assert!(error.is_write());
    assert_eq!(
        error.to_string(),
        "/dev/null/checkpoint: cannot be written: Not a directory (os error 20)"
    );
}

#[test]
fn a_file_that_may_not_grow_is_a_write_error_and_leaves_nothing() {
    let written = |dir: &Path| synthetic(dir.join("new"), &config(), &options());
    if let Some(dir) = child_dir() {
        let error = written(&dir).unwrap_err();
        assert!(error.is_write());
        assert_eq!(
            line(&error, &dir),
            "DIR/new/model.safetensors: cannot be written: File too large (os error 27)"
        );
        assert!(!dir.join("new").exists());
        return;
    }
    let dir = TempDir::new().unwrap();
    let name = "a_file_that_may_not_grow_is_a_write_error_and_leaves_nothing";
    let output = run_child(name, dir.path(), &["sh"], "trap '' XFSZ; ulimit -f 64;");
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_full_disk_is_named_and_leaves_the_older_checkpoint_whole() {
    if let Some(dir) = child_dir() {
        let (older, newer) = (dir.join("older"), dir.join("newer"));
        synthetic(&older, &config(), &options()).unwrap();
        let bytes = fs::read(older.join(SINGLE)).unwrap();
        let options = Synthetic {
            shard_bytes_max: 20_000,
            ..options()
        };
        let error = synthetic(&newer, &config(), &options).unwrap_err();
        assert!(error.is_write());
        let line = line(&error, &dir);
        assert!(line.starts_with("DIR/newer/model-0000"), "{line}");
        assert!(
            line.ends_with(
                "-of-00004.safetensors: disk full, the checkpoint has 74272 bytes of tensors; \
                 free some space or choose another directory (nothing was left there)"
            ),
            "{line}"
        );
        assert!(!newer.exists());
        // Without room for a single file more, the same.
        let filler = fs::File::create(dir.join("filler")).unwrap();
        while (&filler).write_all(&[0; 4096]).is_ok() {}
        while fs::create_dir(dir.join(format!("filler-{}", listing(&dir).len()))).is_ok() {}
        let error = synthetic(&newer, &config(), &options).unwrap_err();
        assert!(error.is_write(), "{error}");
        assert!(!newer.exists());
        assert!(fs::read(older.join(SINGLE)).unwrap() == bytes);
        Checkpoint::open(&older).unwrap();
        return;
    }
    let dir = TempDir::new().unwrap();
    let mount = "mount -t tmpfs -o size=160k,nr_inodes=64 none \"$0\" || exit 77;";
    let name = "a_full_disk_is_named_and_leaves_the_older_checkpoint_whole";
    let namespace = ["unshare", "--user", "--map-root-user", "--mount"];
    if !Command::new(namespace[0])
        .args(&namespace[1..])
        .arg("true")
        .status()
        .is_ok_and(|s| s.success())
    {
        eprintln!(
            "skipped: this machine lets no test have a mount namespace, so no small disk can be made"
        );
        return;
    }
    let output = run_child(name, dir.path(), &[&namespace[..], &["sh"]].concat(), mount);
    if output.status.code() == Some(77) {
        eprintln!("skipped: no tmpfs can be mounted: {output:?}");
        return;
    }
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn what_was_planned_is_written_once_and_whole() {
    let dir = TempDir::new().unwrap();
    let create = |tensors: &[TensorPlan]| Writer::create(&dir, "{}", tensors, 100);
    let message = |e: Error| {
        assert!(!e.is_write());
        e.to_string()
    };
    let twice = [&tensors()[..], &tensors()[..1]].concat();
    assert_eq!(
        message(create(&twice).err().unwrap()),
        "tensor a: is planned twice"
    );
    let mut huge = tensors();
    huge[1].shape = vec![1 << 40, 1 << 40];
    assert_eq!(
        message(create(&huge).err().unwrap()),
        "tensor b: shape [1099511627776, 1099511627776] of dtype F32 is no whole number of bytes, or too many"
    );
    let mut bytes = tensors();
    bytes[1].dtype = FileDtype::U8;
    let mut writer = create(&bytes).unwrap();
    for (result, expected) in [
        (
            writer.write("c", &[0; 8]),
            "tensor c: was not planned when the writer was made",
        ),
        (
            writer.write("a", &[0; 7]),
            "tensor a: has 7 bytes, 8 were planned",
        ),
        (
            writer.write_f32("a", [0.0]),
            "tensor a: has 1 values, 2 were planned",
        ),
        (
            writer.write_f32("a", [0.0; 5]),
            "tensor a: has 5 values, 2 were planned",
        ),
        (
            writer.write_f32("b", [0.0; 2]),
            "tensor b: holds U8, f32 values fit F32 and BF16 alone",
        ),
    ] {
        assert_eq!(message(result.unwrap_err()), expected);
    }
    writer.write("a", &[0; 8]).unwrap();
    assert_eq!(
        message(writer.write("a", &[0; 8]).unwrap_err()),
        "tensor a: is written twice"
    );
    assert_eq!(
        message(writer.finish().unwrap_err()),
        "tensor b: was planned and never written"
    );
    assert_eq!(listing(dir.path()), Vec::<String>::new());
}
