//! What is written is read back bit for bit, and other readers and writers of the format agree.

mod common;

use common::*;
use half::bf16;
use m3_checkpoint::{Checkpoint, FileDtype, Synthetic, TensorPlan, Writer, plan, synthetic};
use m3_spec::config::Config;
use m3_spec::dtype::DType;
use m3_spec::tensors::tensors;
use safetensors::SafeTensors;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// Every text tensor as (name, dtype, shape, f32 bits).
fn values(dir: impl AsRef<Path>) -> Vec<(String, DType, Vec<usize>, Vec<u32>)> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let read = |name: &str| {
        let tensor = checkpoint.tensor(name).unwrap();
        let mut values = vec![0.0; tensor.elements()];
        tensor.read_f32(&mut values).unwrap();
        let bits = values.iter().map(|v| v.to_bits()).collect();
        (name.to_owned(), tensor.dtype, tensor.shape.to_vec(), bits)
    };
    checkpoint.names().map(read).collect()
}

/// The same without dtypes, to compare storages.
fn bits(dir: impl AsRef<Path>) -> Vec<(String, Vec<u32>)> {
    let values = values(dir).into_iter();
    values.map(|(name, _, _, bits)| (name, bits)).collect()
}

/// Copies every tensor, passed over or not, through the writer.
fn copy(from: &Checkpoint, to: &Path, shard_bytes_max: u64) {
    let tensors: Vec<_> = from
        .files()
        .iter()
        .map(|tensor| TensorPlan {
            name: tensor.name.to_owned(),
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
        })
        .collect();
    let mut writer = Writer::create(to, from.config_json(), &tensors, shard_bytes_max).unwrap();
    for tensor in from.files().iter() {
        writer.write(tensor.name, tensor.bytes).unwrap();
    }
    writer.finish().unwrap();
}

fn golden_checkpoints() -> Vec<std::path::PathBuf> {
    let dirs = fs::read_dir(repository("golden/checkpoints")).unwrap();
    let mut dirs: Vec<_> = dirs.map(|dir| dir.unwrap().path()).collect();
    dirs.sort();
    assert!(!dirs.is_empty());
    dirs
}

#[test]
fn checkpoints_of_transformers_open_and_survive_a_copy() {
    for dir in golden_checkpoints() {
        let original = Checkpoint::open(&dir).unwrap();
        assert!(original.passed_over().count() > 0, "{}", dir.display());
        for shard_bytes_max in [u64::MAX, 40_000] {
            let target = TempDir::new().unwrap();
            copy(&original, target.path(), shard_bytes_max);
            let copied = Checkpoint::open(&target).unwrap();
            assert_eq!(copied.config(), original.config());
            assert_eq!(copied.files().len(), original.files().len());
            for (a, b) in original.files().iter().zip(copied.files().iter()) {
                assert_eq!((a.name, a.dtype, a.shape), (b.name, b.dtype, b.shape));
                assert_eq!(a.bytes, b.bytes, "{}", a.name);
            }
        }
    }
}

#[test]
fn layouts_schemas_and_storages_of_the_same_weights_agree() {
    let golden = |name: &str| repository("golden/checkpoints").join(name);
    let basic = bits(golden("basic"));
    for other in ["basic-released", "basic-sharded", "basic-f32"] {
        assert!(bits(golden(other)) == basic, "{other}");
    }
}

#[test]
fn the_safetensors_crate_reads_what_is_written() {
    let dir = sharded();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let mut count = 0;
    for shard in shards(&dir) {
        let bytes = fs::read(shard).unwrap();
        for (name, theirs) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let ours = checkpoint.files().get(&name).unwrap();
            assert_eq!((ours.dtype, ours.shape), (theirs.dtype(), theirs.shape()));
            assert!(ours.bytes == theirs.data(), "{name}");
            count += 1;
        }
    }
    assert_eq!(count, checkpoint.names().count());
}

#[test]
fn one_file_two_shards_bf16_and_f32_hold_equal_weights() {
    let expected = bits(checkpoint());
    assert!(bits(sharded()) == expected);
    for shard_bytes_max in [u64::MAX, 100_000] {
        let dir = TempDir::new().unwrap();
        let options = Synthetic {
            storage: DType::F32,
            shard_bytes_max,
            ..options()
        };
        synthetic(&dir, &config(), &options).unwrap();
        assert!(
            values(&dir)
                .iter()
                .all(|(_, dtype, _, _)| *dtype == DType::F32)
        );
        assert!(bits(&dir) == expected);
    }
}

#[test]
fn router_weight_and_bias_are_written_as_f32() {
    for (name, dtype, _, _) in values(checkpoint()) {
        let is_f32 = name.ends_with("block_sparse_moe.gate.weight") || name == ROUTER_BIAS;
        assert_eq!(dtype == DType::F32, is_f32, "{name}");
    }
}

#[test]
fn the_router_bias_keeps_its_bits() {
    // 34.5 and 34.56 are one number in bf16 and would let expert 0 win.
    let bias = [
        34.5f32,
        34.56,
        -0.0,
        f32::MIN_POSITIVE / 2.0,
        1e-30,
        3.1,
        f32::MAX,
        0.1,
    ];
    let dir = checkpoint();
    edit(&dir, |tensors| {
        find(tensors, ROUTER_BIAS).bytes = bias.iter().flat_map(|v| v.to_le_bytes()).collect();
    });
    let target = TempDir::new().unwrap();
    copy(&Checkpoint::open(&dir).unwrap(), target.path(), u64::MAX);
    for dir in [&dir, &target] {
        let checkpoint = Checkpoint::open(dir).unwrap();
        let mut loaded = [0.0; 8];
        checkpoint
            .tensor(ROUTER_BIAS)
            .unwrap()
            .read_f32(&mut loaded)
            .unwrap();
        assert_eq!(loaded.map(f32::to_bits), bias.map(f32::to_bits));
    }
}

#[test]
fn f32_is_rounded_once_to_bf16_and_bf16_is_widened_exactly() {
    let tie_down = 1.0 + 1.0 / 256.0;
    let tie_up = 1.0 + 3.0 / 256.0;
    let bias = [
        tie_down,
        tie_up,
        -tie_down,
        34.56,
        1e-40,
        -0.0,
        f32::MAX,
        0.1,
    ];
    let dir = checkpoint();
    edit(&dir, |tensors| {
        find(tensors, ROUTER_BIAS).bytes = bias.iter().flat_map(|v| v.to_le_bytes()).collect();
    });
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let mut loaded = [bf16::ZERO; 8];
    checkpoint
        .tensor(ROUTER_BIAS)
        .unwrap()
        .read_bf16(&mut loaded)
        .unwrap();
    let expected = [
        0x3f80, 0x3f82, 0xbf80, 0x420a, 0x0001, 0x8000, 0x7f80, 0x3dcd,
    ];
    assert_eq!(loaded.map(bf16::to_bits), expected);

    let tensor = checkpoint.tensor(EMBEDDING).unwrap();
    assert_eq!(tensor.dtype, DType::BF16);
    let (mut wide, mut narrow) = (vec![0.0; 64 * 32], vec![bf16::ZERO; 64 * 32]);
    tensor.read_f32(&mut wide).unwrap();
    tensor.read_bf16(&mut narrow).unwrap();
    assert!(
        wide.iter()
            .zip(&narrow)
            .all(|(w, n)| w.to_bits() == n.to_f32().to_bits())
    );
}

#[test]
fn a_tensor_of_no_elements_with_equal_offsets_is_kept() {
    let dir = checkpoint();
    edit(&dir, |tensors| {
        tensors.insert(1, Raw::new("vision_tower.empty", "F32", &[0], 0));
        tensors.push(Raw::new("vision_tower.empty_too", "F32", &[4, 0], 0));
    });
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let target = TempDir::new().unwrap();
    copy(&checkpoint, target.path(), 50_000);
    let copied = Checkpoint::open(&target).unwrap();
    for (name, shape) in [
        ("vision_tower.empty", &[0][..]),
        ("vision_tower.empty_too", &[4, 0]),
    ] {
        let tensor = copied.files().get(name).unwrap();
        assert_eq!((tensor.shape, tensor.bytes.len()), (shape, 0));
    }
}

#[test]
fn what_is_not_of_the_text_model_is_passed_over_with_its_size() {
    let dir = checkpoint();
    let names = [
        "mtp.layers.0.enorm.weight",
        "patch_merge_mlp.linear_1.bias",
        "vision_tower.x",
    ];
    edit(&dir, |tensors| {
        // Dtypes that the text model may not have are nobody's concern here.
        tensors.extend(names.map(|name| Raw::new(name, "F16", &[3], 6)));
    });
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let passed: Vec<_> = checkpoint
        .passed_over()
        .map(|t| (t.name, t.bytes.len()))
        .collect();
    assert_eq!(passed, names.map(|name| (name, 6)));
    assert!(checkpoint.names().all(|name| !names.contains(&name)));
}

#[test]
fn tensors_come_in_the_order_of_the_model() {
    let dir = checkpoint();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let names: Vec<_> = checkpoint.names().collect();
    assert_eq!(names[0], EMBEDDING);
    assert_eq!(names[names.len() - 1], "language_model.lm_head.weight");
    assert_eq!(checkpoint.specs(), tensors(&config().text));
}

#[test]
fn synthetic_weights_follow_seed_and_std_alone() {
    let write = |options: Synthetic| {
        let dir = TempDir::new().unwrap();
        synthetic(&dir, &config(), &options).unwrap();
        bits(&dir)
    };
    let weights = write(options());
    assert!(weights == write(options()));
    assert!(
        weights
            != write(Synthetic {
                seed: 8,
                ..options()
            })
    );
    let f32s = |name: &str| -> Vec<f64> {
        let (_, bits) = weights.iter().find(|(n, _)| n == name).unwrap();
        bits.iter().map(|&b| f64::from(f32::from_bits(b))).collect()
    };
    let embedding = f32s(EMBEDDING);
    let n = embedding.len() as f64;
    let mean = embedding.iter().sum::<f64>() / n;
    let std = (embedding.iter().map(|v| v * v).sum::<f64>() / n).sqrt();
    // 2,048 draws: the mean's sd is 0.02/45, the std's 0.02/64; five of each.
    assert!(mean.abs() <= 2.2e-3, "{mean}");
    assert!((std - 0.02).abs() <= 1.6e-3, "{std}");
    assert!(embedding != f32s("language_model.lm_head.weight"));
}

#[test]
fn norms_and_bias_of_a_plain_synthetic_checkpoint_are_zero() {
    let dir = TempDir::new().unwrap();
    let tiny = Config::named("echo").unwrap();
    synthetic(&dir, &tiny, &Synthetic::new(1, 0.1)).unwrap();
    for (name, bits) in bits(&dir) {
        let is_zero = name.contains("norm") || name.ends_with("bias");
        assert_eq!(bits.iter().all(|&b| b == 0), is_zero, "{name}");
    }
}

#[test]
fn the_plan_of_a_config_is_what_is_written() {
    let dir = checkpoint();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    for tensor in plan(&config().text, DType::BF16) {
        let written = checkpoint.files().get(&tensor.name).unwrap();
        assert_eq!(
            (written.dtype, written.shape),
            (tensor.dtype, &tensor.shape[..])
        );
        assert!([FileDtype::F32, FileDtype::BF16].contains(&tensor.dtype));
        // What a reader maps can be used as it lies.
        assert!(
            written
                .bytes
                .as_ptr()
                .addr()
                .is_multiple_of(tensor.dtype.bitsize() / 8)
        );
    }
}
