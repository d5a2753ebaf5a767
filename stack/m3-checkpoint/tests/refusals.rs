//! Every refusal of the reader, with its exact line.

mod common;

use common::*;
use m3_checkpoint::Checkpoint;
use serde_json::{Value, json};
use std::fs;
use tempfile::TempDir;

/// The refusal of a checkpoint whose one file is this header and `data` bytes.
fn refusal_of_header(header: impl AsRef<[u8]>, data: usize) -> String {
    let dir = checkpoint();
    write_file(&dir.path().join(SINGLE), header, &vec![0; data]);
    refusal(&dir)
}

fn edit_config(dir: &TempDir, edit: impl FnOnce(&mut Value)) {
    let path = dir.path().join("config.json");
    let mut config = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut config);
    fs::write(path, config.to_string()).unwrap();
}

fn edit_index(dir: &TempDir, edit: impl FnOnce(&mut Value)) {
    let path = dir.path().join(INDEX);
    let mut index = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut index);
    fs::write(path, index.to_string()).unwrap();
}

#[test]
fn absent_files_are_named() {
    let empty = TempDir::new().unwrap();
    assert_eq!(
        refusal(&empty),
        "DIR/config.json: cannot be read: No such file or directory (os error 2)"
    );
    let dir = checkpoint();
    fs::remove_file(dir.path().join(SINGLE)).unwrap();
    assert_eq!(
        refusal(&dir),
        "DIR: neither model.safetensors nor model.safetensors.index.json is here; name the directory of a released checkpoint"
    );
}

#[test]
fn two_layouts_at_once_are_refused() {
    let dir = checkpoint();
    fs::write(dir.path().join(INDEX), "{}").unwrap();
    assert_eq!(
        refusal(&dir),
        "DIR: both model.safetensors and model.safetensors.index.json are here; remove the one that is not meant"
    );
}

#[test]
fn a_refused_config_is_named_with_its_file() {
    let dir = checkpoint();
    edit_config(&dir, |config| config["vocab_size"] = "many".into());
    let line = refusal(&dir);
    assert!(
        line.starts_with("DIR/config.json: vocab_size must be"),
        "{line}"
    );
}

#[test]
fn a_quantised_checkpoint_is_sent_to_the_converter() {
    let dir = checkpoint();
    edit_config(&dir, |config| {
        config["quantization_config"] = json!({"quant_method": "mxfp8"});
    });
    assert_eq!(
        refusal(&dir),
        "DIR/config.json: declares quantization_config; write a BF16 copy first: m3 convert dequant SRC DST"
    );
    let dir = checkpoint();
    edit(&dir, |tensors| {
        let name = "language_model.model.layers.0.self_attn.q_proj.weight_scale_inv";
        tensors.push(Raw::new(name, "U8", &[64, 1], 64));
    });
    assert_eq!(
        refusal(&dir),
        "DIR/model.safetensors: tensor language_model.model.layers.0.self_attn.q_proj.weight_scale_inv is unexpected: \
         it belongs to a quantised checkpoint; write a BF16 copy first: m3 convert dequant SRC DST"
    );
    let dir = checkpoint();
    edit(&dir, |tensors| {
        let tensor = find(tensors, EMBEDDING);
        tensor.dtype = "F8_E4M3".into();
        tensor.bytes.truncate(64 * 32);
    });
    assert_eq!(
        refusal(&dir),
        "DIR/model.safetensors: tensor language_model.model.embed_tokens.weight has dtype F8_E4M3, F32 or BF16 is expected; \
         a quantised checkpoint needs a BF16 copy first: m3 convert dequant SRC DST"
    );
}

#[test]
fn a_file_without_a_header_is_refused() {
    let dir = checkpoint();
    let path = dir.path().join(SINGLE);
    for (bytes, expected) in [
        (
            &b""[..],
            "has 0 bytes, a safetensors file has at least 8; get the file again",
        ),
        (
            b"1234567",
            "has 7 bytes, a safetensors file has at least 8; get the file again",
        ),
        (
            b"\x09\0\0\0\0\0\0\0{}      ",
            "its header claims 9 bytes, the file has 16; it is cut off or no safetensors file, get it again",
        ),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "is a Git LFS pointer, not the file itself; get it with: git lfs pull",
        ),
    ] {
        fs::write(&path, bytes).unwrap();
        assert_eq!(refusal(&dir), format!("DIR/model.safetensors: {expected}"));
    }
}

#[test]
fn a_directory_in_place_of_a_file_is_refused() {
    let dir = checkpoint();
    fs::remove_file(dir.path().join(SINGLE)).unwrap();
    fs::create_dir(dir.path().join(SINGLE)).unwrap();
    assert_eq!(
        refusal(&dir),
        "DIR/model.safetensors: is not a regular file"
    );
}

#[test]
fn a_header_longer_than_the_format_allows_is_refused() {
    let dir = checkpoint();
    let path = dir.path().join(SINGLE);
    let bytes: u64 = 100_000_001;
    fs::write(&path, bytes.to_le_bytes()).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.set_len(bytes + 8).unwrap();
    assert_eq!(
        refusal(&dir),
        "DIR/model.safetensors: its header claims 100000001 bytes, the format allows 100000000"
    );
}

#[test]
fn a_header_that_is_no_json_object_is_refused() {
    for (header, expected) in [
        (
            &b"{\"a\xff\":1}"[..],
            "its header is not UTF-8 from byte 3 on; get the file again",
        ),
        (
            b"{\"a\":",
            "its header is not the JSON that safetensors asks for: EOF while parsing a value at line 1 column 5",
        ),
        (
            b"[]",
            "its header is not the JSON that safetensors asks for: invalid type: sequence, expected an object at line 1 column 0",
        ),
        (
            b"{} {}",
            "its header is not the JSON that safetensors asks for: trailing characters at line 1 column 4",
        ),
    ] {
        let line = refusal_of_header(header, 0);
        assert_eq!(line, format!("DIR/model.safetensors: {expected}"));
    }
}

#[test]
fn a_malformed_description_names_its_tensor() {
    for (entry, expected) in [
        (
            r#"{"dtype":"Q7","shape":[1],"data_offsets":[0,4]}"#,
            "its header describes tensor a wrongly: dtype \"Q7\" is unknown",
        ),
        (
            r#"{"dtype":"F32","shape":[1]}"#,
            "its header describes tensor a wrongly: missing field `data_offsets` at line 1 column 27",
        ),
        (
            r#"{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}"#,
            "its header describes tensor a wrongly: duplicate field `shape` at line 1 column 34",
        ),
        (
            r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#,
            "its header describes tensor a wrongly: invalid value: integer `-1`, expected usize at line 1 column 26",
        ),
    ] {
        let line = refusal_of_header(format!(r#"{{"a":{entry}}}"#), 4);
        assert_eq!(line, format!("DIR/model.safetensors: {expected}"));
    }
}

#[test]
fn a_tensor_listed_twice_is_refused() {
    let entry = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
    assert_eq!(
        refusal_of_header(format!(r#"{{"a":{entry},"a":{entry}}}"#), 4),
        "DIR/model.safetensors: its header lists tensor a twice"
    );
}

#[test]
fn offsets_that_hold_another_size_are_refused() {
    for (entry, expected) in [
        (
            r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4]}"#,
            "tensor a of dtype F32 and shape [2] needs 8 bytes, its offsets [0, 4] hold 4 bytes",
        ),
        (
            r#"{"dtype":"F32","shape":[1],"data_offsets":[4,0]}"#,
            "tensor a of dtype F32 and shape [1] needs 4 bytes, its offsets [4, 0] hold no whole number of bytes",
        ),
        (
            r#"{"dtype":"BF16","shape":[4294967296,4294967296],"data_offsets":[0,4]}"#,
            "tensor a of dtype BF16 and shape [4294967296, 4294967296] needs no whole number of bytes, \
             its offsets [0, 4] hold 4 bytes",
        ),
    ] {
        let line = refusal_of_header(format!(r#"{{"a":{entry}}}"#), 4);
        assert_eq!(line, format!("DIR/model.safetensors: {expected}"));
    }
}

#[test]
fn overlaps_and_gaps_are_refused() {
    let header = |begin: usize| {
        json!({
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [begin, begin + 4]},
        })
        .to_string()
    };
    assert_eq!(
        refusal_of_header(header(4), 8),
        "DIR/model.safetensors: tensor b begins at byte 4, inside a, which ends at 8"
    );
    assert_eq!(
        refusal_of_header(header(12), 16),
        "DIR/model.safetensors: tensor b begins at byte 12, the data before it ends at 8"
    );
}

#[test]
fn a_tensor_of_one_element_needs_more_than_equal_offsets() {
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,8]}}"#;
    assert_eq!(
        refusal_of_header(header, 8),
        "DIR/model.safetensors: tensor b of dtype F32 and shape [1] needs 4 bytes, its offsets [8, 8] hold 0 bytes"
    );
}

#[test]
fn a_cut_off_file_is_refused_with_both_sizes() {
    let dir = checkpoint();
    let path = dir.path().join(SINGLE);
    let whole = fs::metadata(&path).unwrap().len();
    // The last tensor loses its end; then it begins after the end of the file.
    for cut in [4, 5_000] {
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_len(whole - cut).unwrap();
        assert_eq!(
            refusal(&dir),
            format!(
                "DIR/model.safetensors: its header declares {whole} bytes, the file has {}; it is cut off, get it again",
                whole - cut
            )
        );
    }
}

#[test]
fn bytes_after_the_last_tensor_are_refused() {
    let dir = checkpoint();
    let path = dir.path().join(SINGLE);
    let whole = fs::metadata(&path).unwrap().len();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.set_len(whole + 1).unwrap();
    assert_eq!(
        refusal(&dir),
        format!(
            "DIR/model.safetensors: its header declares {whole} bytes, the file has {}; get it again",
            whole + 1
        )
    );
}

#[test]
fn an_index_that_is_none_is_refused() {
    let dir = sharded();
    for (text, expected) in [
        (
            "{",
            "is not an index of shards: EOF while parsing an object at line 1 column 1",
        ),
        (
            "{}",
            "is not an index of shards: missing field `weight_map` at line 1 column 2",
        ),
        (
            r#"{"weight_map":{"a":1}}"#,
            "is not an index of shards: invalid type: integer `1`, expected a string at line 1 column 20",
        ),
        (
            r#"{"weight_map":{"a":"x","a":"x"}}"#,
            "lists tensor a twice",
        ),
    ] {
        fs::write(dir.path().join(INDEX), text).unwrap();
        let line = refusal(&dir);
        assert_eq!(
            line,
            format!("DIR/model.safetensors.index.json: {expected}")
        );
    }
}

#[test]
fn a_shard_outside_the_directory_is_refused() {
    for shard in ["../model.safetensors", "/etc/passwd", ""] {
        let dir = sharded();
        edit_index(&dir, |index| index["weight_map"][EMBEDDING] = shard.into());
        assert_eq!(
            refusal(&dir),
            format!(
                "DIR/model.safetensors.index.json: names shard {shard}, which is not a path inside the directory"
            )
        );
    }
}

#[test]
fn an_absent_shard_is_named() {
    let dir = sharded();
    fs::remove_file(dir.path().join("model-00002-of-00002.safetensors")).unwrap();
    assert_eq!(
        refusal(&dir),
        "DIR/model.safetensors.index.json: names shard model-00002-of-00002.safetensors, which is absent; \
         get the file or write the checkpoint again"
    );
}

#[test]
fn a_tensor_that_its_shard_lacks_is_refused() {
    let dir = sharded();
    edit_index(&dir, |index| {
        index["weight_map"][EMBEDDING] = "model-00002-of-00002.safetensors".into();
    });
    assert_eq!(
        refusal(&dir),
        "DIR/model.safetensors.index.json: places tensor language_model.model.embed_tokens.weight in \
         model-00002-of-00002.safetensors, which does not hold it"
    );
}

#[test]
fn a_tensor_that_the_index_does_not_list_is_refused() {
    let dir = sharded();
    edit_index(&dir, |index| {
        index["weight_map"]
            .as_object_mut()
            .unwrap()
            .remove(EMBEDDING);
    });
    assert_eq!(
        refusal(&dir),
        "DIR/model.safetensors.index.json: does not list tensor language_model.model.embed_tokens.weight, \
         which model-00001-of-00002.safetensors holds"
    );
}

#[test]
fn a_tensor_in_two_shards_is_refused() {
    let dir = sharded();
    let shards = shards(&dir);
    let embedding = find(&mut read_raw(&shards[0]), EMBEDDING).clone();
    let mut second = read_raw(&shards[1]);
    second.push(embedding);
    write_raw(&shards[1], &second);
    assert_eq!(
        refusal(&dir),
        "tensor language_model.model.embed_tokens.weight is in model-00001-of-00002.safetensors and in \
         model-00002-of-00002.safetensors; keep one of them"
    );
}

#[test]
fn missing_tensors_are_named_and_counted() {
    let dir = checkpoint();
    edit(&dir, |tensors| tensors.retain(|t| t.name != EMBEDDING));
    assert_eq!(
        refusal(&dir),
        "DIR: tensor language_model.model.embed_tokens.weight is missing; config.json calls for it"
    );
    edit(&dir, |tensors| {
        tensors.retain(|t| !t.name.ends_with("norm.weight"))
    });
    assert_eq!(
        refusal(&dir),
        "DIR: tensor language_model.model.embed_tokens.weight is missing, and 11 more; config.json calls for it"
    );
}

#[test]
fn a_config_with_absurd_sizes_is_refused_before_any_tensor_is_listed() {
    let dir = checkpoint();
    edit_config(&dir, |config| {
        config["num_local_experts"] = 4_000_000_000_000u64.into()
    });
    assert_eq!(
        refusal(&dir),
        "DIR/config.json: num_local_experts 4000000000000 exceeds 4096"
    );
}

#[test]
fn an_unexpected_tensor_gets_the_name_that_was_meant_or_the_reason() {
    for (name, hint) in [
        (
            "language_model.model.layers.0.self_attn.q_porj.weight",
            "language_model.model.layers.0.self_attn.q_proj.weight is meant?",
        ),
        (
            "model.norm.weight",
            "language_model.model.norm.weight is meant?",
        ),
        (
            "language_model.model.layers.2.input_layernorm.weight",
            "config.json has 2 layers",
        ),
        (
            "language_model.model.layers.1.block_sparse_moe.experts.8.w1.weight",
            "config.json has 8 experts",
        ),
        (
            "language_model.model.layers.0.self_attn.index_q_proj.weight",
            "config.json gives layer 0 dense attention",
        ),
        (
            "language_model.model.layers.1.mlp.gate_proj.weight",
            "config.json gives layer 1 experts and no dense MLP",
        ),
        (
            "language_model.model.layers.0.block_sparse_moe.gate.weight",
            "config.json gives layer 0 a dense MLP and no experts",
        ),
        (
            "optimizer",
            "no part of this model has such a name; remove it or move it to a directory of its own",
        ),
    ] {
        let dir = checkpoint();
        edit(&dir, |tensors| tensors.push(Raw::new(name, "F32", &[1], 4)));
        assert_eq!(
            refusal(&dir),
            format!("DIR/model.safetensors: tensor {name} is unexpected: {hint}")
        );
    }
}

#[test]
fn a_name_from_a_file_stays_on_one_short_line() {
    let dir = checkpoint();
    let name = format!("evil\n\u{1b}[31m{}", "x".repeat(5_000));
    edit(&dir, |tensors| {
        tensors.push(Raw::new(&name, "F32", &[1], 4))
    });
    let line = refusal(&dir);
    assert!(line.contains("evil\\n\\u{1b}[31mxxx"), "{line}");
    assert!(line.len() < 500, "{line}");
}

#[test]
fn a_wrong_shape_names_both() {
    let dir = checkpoint();
    edit(&dir, |tensors| {
        find(tensors, EMBEDDING).shape = vec![32, 64]
    });
    assert_eq!(
        refusal(&dir),
        "DIR/model.safetensors: tensor language_model.model.embed_tokens.weight has shape [32, 64], \
         config.json calls for [64, 32]"
    );
}

#[test]
fn f16_and_every_other_dtype_are_refused_by_name() {
    for (dtype, bytes) in [("F16", 2), ("F64", 8), ("I64", 8)] {
        let dir = checkpoint();
        edit(&dir, |tensors| {
            let tensor = find(tensors, EMBEDDING);
            tensor.dtype = dtype.into();
            tensor.bytes = vec![0; 64 * 32 * bytes];
        });
        assert_eq!(
            refusal(&dir),
            format!(
                "DIR/model.safetensors: tensor language_model.model.embed_tokens.weight has dtype {dtype}, \
                 F32 or BF16 is expected; store it as BF16 or F32"
            )
        );
    }
}

#[test]
fn a_tensor_that_is_not_of_the_text_model_cannot_be_asked_for() {
    let dir = checkpoint();
    edit(&dir, |tensors| {
        tensors.push(Raw::new("vision_tower.x", "F32", &[1], 4))
    });
    let checkpoint = Checkpoint::open(&dir).unwrap();
    for name in ["vision_tower.x", "model.norm.weight"] {
        let line = checkpoint.tensor(name).unwrap_err().to_string();
        let line = line.replace(dir.path().to_str().unwrap(), "DIR");
        assert_eq!(line, format!("DIR: no text tensor is named {name}"));
    }
}

#[test]
fn a_buffer_of_another_length_is_refused() {
    let dir = checkpoint();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let bias = checkpoint.tensor(ROUTER_BIAS).unwrap();
    let error = bias.read_f32(&mut [0.0; 7]).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("tensor {ROUTER_BIAS} has 8 elements, the buffer 7")
    );
}
