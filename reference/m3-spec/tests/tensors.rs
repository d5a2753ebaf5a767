//! Tensor tables against checkpoints that transformers wrote in the released names.

use m3_spec::config::Config;
use m3_spec::tensors::all_tensors;
use std::collections::BTreeMap;
use std::path::Path;

/// Names and shapes from the header of a safetensors file.
fn header(path: &Path) -> BTreeMap<String, Vec<usize>> {
    let bytes = std::fs::read(path).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    let entries = header
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| *name != "__metadata__");
    let shape = |v: &serde_json::Value| serde_json::from_value(v["shape"].clone()).unwrap();
    entries.map(|(name, v)| (name.clone(), shape(v))).collect()
}

#[test]
fn every_tensor_of_a_written_checkpoint_is_in_the_table_and_no_other() {
    let checkpoints = Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../golden/checkpoints"
    ));
    let mut compared = 0;
    for entry in std::fs::read_dir(checkpoints).unwrap() {
        let dir = entry.unwrap().path();
        let Ok(json) = std::fs::read_to_string(dir.join("config.json")) else {
            continue;
        };
        let weights = dir.join("model.safetensors");
        if !weights.exists() {
            continue;
        }
        let config = Config::from_json(&json).unwrap();
        let expected: BTreeMap<_, _> = all_tensors(&config)
            .into_iter()
            .map(|t| (t.name, t.shape))
            .collect();
        assert_eq!(header(&weights), expected, "{}", dir.display());
        compared += 1;
    }
    assert!(compared >= 8, "{compared} checkpoints");
}
