//! Memory follows what is read, not how large the files are.

mod common;

use common::*;
use m3_checkpoint::{Checkpoint, plan};
use m3_spec::config::Config;
use m3_spec::dtype::DType;
use serde_json::{Map, Value, json};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;
use tempfile::TempDir;

const CHILD_DIR: &str = "M3_CHECKPOINT_CHILD_DIR";

/// A field of /proc/self/status, in KiB.
fn status_kib(field: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// A file with a header for these tensors and a hole for their bytes; false where the file system has no holes.
fn write_sparse(path: &Path, tensors: &[(String, &str, Vec<usize>, u64)]) -> bool {
    let (mut header, mut end) = (Map::new(), 0);
    for (name, dtype, shape, bytes) in tensors {
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [end, end + bytes]});
        header.insert(name.clone(), entry);
        end += bytes;
    }
    let header = Value::Object(header).to_string();
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(header.as_bytes()).unwrap();
    const BLOCK_BYTES: u64 = 512;
    let is_sparse = file.set_len(8 + header.len() as u64 + end).is_ok()
        && file.metadata().unwrap().blocks() * BLOCK_BYTES < 64 << 20;
    if !is_sparse {
        eprintln!(
            "skipped: {} lies on a file system without sparse files of {end} bytes",
            path.display()
        );
    }
    is_sparse
}

fn text_tensors(config: &Config) -> Vec<(String, &'static str, Vec<usize>, u64)> {
    let tensors = plan(&config.text, DType::BF16).into_iter().map(|tensor| {
        let is_f32 = tensor.dtype == m3_checkpoint::FileDtype::F32;
        let (dtype, size) = if is_f32 { ("F32", 4) } else { ("BF16", 2) };
        let bytes = tensor.shape.iter().product::<usize>() as u64 * size;
        (tensor.name, dtype, tensor.shape, bytes)
    });
    tensors.collect()
}

/// Runs the test `name` again as a child in `dir`, so that its memory is its own.
fn run_child(name: &str, dir: &TempDir) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD_DIR, dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    eprint!("{text}");
}

fn write_config(dir: &TempDir, config: &Config) {
    let json = config.to_released_json().to_string();
    fs::write(dir.path().join("config.json"), json).unwrap();
}

#[test]
fn a_tiny_model_beside_40_gb_of_vision_is_read_in_little_memory() {
    const VISION_BYTES: u64 = 40_000_000_000;
    // The model has 74 kB; a test binary alone starts at 3 MiB.
    const PEAK_KIB_MAX: u64 = 16 << 10;
    if let Some(dir) = std::env::var_os(CHILD_DIR) {
        let before_kib = status_kib("RssAnon");
        let checkpoint = Checkpoint::open(dir).unwrap();
        let vision: usize = checkpoint.passed_over().map(|t| t.bytes.len()).sum();
        assert_eq!(vision as u64, VISION_BYTES);
        for name in checkpoint.names() {
            let tensor = checkpoint.tensor(name).unwrap();
            let mut values = vec![1.0; tensor.elements()];
            tensor.read_f32(&mut values).unwrap();
            assert!(values.iter().all(|v| *v == 0.0), "a hole reads as zeros");
        }
        let (peak_kib, anonymous_kib) = (status_kib("VmHWM"), status_kib("RssAnon"));
        eprintln!(
            "peak {peak_kib} KiB, of it anonymous {before_kib} KiB before and {anonymous_kib} KiB after"
        );
        assert!(peak_kib <= PEAK_KIB_MAX);
        return;
    }
    let dir = TempDir::new().unwrap();
    write_config(&dir, &config());
    let mut tensors = text_tensors(&config());
    for (number, at) in [0, tensors.len() / 2].into_iter().enumerate() {
        let name = format!("vision_tower.large.{number}.weight");
        tensors.insert(
            at,
            (
                name,
                "BF16",
                vec![VISION_BYTES as usize / 4],
                VISION_BYTES / 2,
            ),
        );
    }
    if write_sparse(&dir.path().join(SINGLE), &tensors) {
        run_child(
            "a_tiny_model_beside_40_gb_of_vision_is_read_in_little_memory",
            &dir,
        );
    }
}

#[test]
fn all_names_of_the_release_open_in_little_memory() {
    // 22,905 tensors, 852 GB: names, shapes and offsets of each are held, no byte of its weights.
    const PEAK_KIB_MAX: u64 = 64 << 10;
    if let Some(dir) = std::env::var_os(CHILD_DIR) {
        let start = Instant::now();
        let checkpoint = Checkpoint::open(dir).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        assert_eq!(checkpoint.names().count(), 22_905);
        let peak_kib = status_kib("VmHWM");
        eprintln!(
            "opened in {seconds:.3} s, peak {peak_kib} KiB, anonymous {} KiB",
            status_kib("RssAnon")
        );
        assert!(peak_kib <= PEAK_KIB_MAX);
        return;
    }
    let dir = TempDir::new().unwrap();
    let config = Config::named("minimax-m3.1-flash").unwrap();
    write_config(&dir, &config);
    if write_sparse(&dir.path().join(SINGLE), &text_tensors(&config)) {
        run_child("all_names_of_the_release_open_in_little_memory", &dir);
    }
}
