//! Bad input to the verbs that compute: one line that names the thing, the contract's exit code, nothing half-written.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../golden")
        .join(name)
}

/// A copy of a golden checkpoint that may be spoilt, and room for other files.
struct Spoilt(tempfile::TempDir);

impl Spoilt {
    fn new(checkpoint: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model");
        fs::create_dir(&model).unwrap();
        for entry in fs::read_dir(golden("checkpoints").join(checkpoint)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
        }
        Spoilt(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn model(&self, name: &str) -> PathBuf {
        self.path("model").join(name)
    }

    fn config(&self, change: impl FnOnce(&mut Value)) {
        let path = self.model("config.json");
        let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        change(&mut config);
        fs::write(path, config.to_string()).unwrap();
    }

    /// Rewrites the header of the one weights file; the data stays as it is.
    fn header(&self, change: impl FnOnce(&mut Value)) {
        let path = self.model("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        change(&mut header);
        let text = header.to_string();
        let mut file = (text.len() as u64).to_le_bytes().to_vec();
        file.extend(text.as_bytes());
        file.extend(&bytes[8 + length..]);
        fs::write(path, file).unwrap();
    }

    fn tokens(&self, text: &str) -> PathBuf {
        let path = self.path("tokens.json");
        fs::write(&path, text).unwrap();
        path
    }

    /// `m3 logprobs` on the model and good tokens, with more arguments.
    fn refused(&self, more: &[&str], code: i32, parts: &[&str]) {
        let tokens = self.tokens(r#"{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]}"#);
        self.refused_with(&tokens, more, code, parts);
    }

    fn refused_with(&self, tokens: &Path, more: &[&str], code: i32, parts: &[&str]) {
        let json = self.path("report.json");
        let output = Command::new(env!("CARGO_BIN_EXE_m3"))
            .args(["logprobs", "--dtype", "f32", "--model"])
            .arg(self.path("model"))
            .arg("--tokens")
            .arg(tokens)
            .arg("--json")
            .arg(&json)
            .args(more)
            .env_remove("M3_DEVICE")
            .output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{more:?}: {stderr}");
        assert!(stderr.starts_with("error: "), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        for part in parts {
            assert!(stderr.contains(part), "{part:?} is not in {stderr}");
        }
        assert!(!json.exists(), "a refused run left {}", json.display());
    }
}

#[test]
fn a_checkpoint_that_is_not_whole_is_refused_by_its_file() {
    let missing = Spoilt::new("basic");
    fs::remove_file(missing.model("model.safetensors")).unwrap();
    missing.refused(&[], 2, &["model.safetensors"]);

    let cut = Spoilt::new("basic");
    let bytes = fs::read(cut.model("model.safetensors")).unwrap();
    fs::write(cut.model("model.safetensors"), &bytes[..bytes.len() - 4]).unwrap();
    cut.refused(&[], 2, &["model.safetensors", "bytes"]);

    let sharded = Spoilt::new("basic-sharded");
    let shard = "model-00002-of-00002.safetensors";
    fs::remove_file(sharded.model(shard)).unwrap();
    sharded.refused(&[], 2, &[shard]);
}

#[test]
fn a_tensor_that_does_not_fit_is_refused_by_its_name() {
    let name = "language_model.model.norm.weight";
    let shape = Spoilt::new("basic");
    shape.header(|header| {
        let elements = header[name]["shape"][0].as_u64().unwrap();
        header[name]["shape"] = json!([elements / 2, 2]);
    });
    shape.refused(&[], 2, &[name, "shape"]);

    let dtype = Spoilt::new("basic");
    dtype.header(|header| header[name]["dtype"] = json!("F16"));
    dtype.refused(&[], 2, &[name, "F16"]);

    let renamed = Spoilt::new("basic");
    renamed.header(|header| {
        let entry = header.as_object_mut().unwrap().remove(name).unwrap();
        header["language_model.model.norm.wieght"] = entry;
    });
    renamed.refused(&[], 2, &["norm"]);
}

#[test]
fn a_config_that_is_refused_names_its_values() {
    let heads = Spoilt::new("basic-released");
    heads.config(|config| config["text_config"]["num_key_value_heads"] = json!(3));
    heads.refused(&[], 2, &["config.json", "3"]);

    let score = Spoilt::new("basic-released");
    score.config(|config| {
        config["text_config"]["sparse_attention_config"]["sparse_score_type"] = json!("lse");
    });
    score.refused(&[], 2, &["config.json", "lse"]);

    // A checkpoint of such heads fits itself; only the kernels cannot take it.
    let odd = Spoilt::new("basic");
    odd.config(|config| {
        config["text_config"]["head_dim"] = json!(4);
        config["text_config"]["num_attention_heads"] = json!(16);
        config["text_config"]["num_key_value_heads"] = json!(8);
    });
    odd.refused(&[], 2, &["config.json"]);

    let lists = Spoilt::new("basic-released");
    lists.config(|config| {
        let text = config["text_config"].as_object_mut().unwrap();
        text.remove("moe_layer_freq");
    });
    lists.refused(&[], 2, &["moe_layer_freq"]);
}

#[test]
fn tokens_that_do_not_fit_are_refused_by_their_place() {
    let model = Spoilt::new("basic");
    for (text, part) in [
        (r#"{"input_ids": [1, 999999, 3]}"#, "999999"),
        (r#"{"input_ids": [1, -1]}"#, "-1"),
        (r#"{"sequences": [[1, 2], []]}"#, "sequence 1"),
        (r#"{"sequences": []}"#, "no sequence"),
        ("[1, 2", "tokens.json"),
        (r#"{"tokens": [1]}"#, "input_ids"),
    ] {
        let tokens = model.tokens(text);
        model.refused_with(&tokens, &[], 2, &[part]);
        model.refused_with(&tokens, &["--engine", "rollout"], 2, &[part]);
    }
    let long = Spoilt::new("basic");
    long.config(|config| config["text_config"]["max_position_embeddings"] = json!(8));
    long.refused(&[], 2, &["9 tokens", "8"]);
}

#[test]
fn an_output_that_cannot_be_written_ends_with_its_own_code() {
    let model = Spoilt::new("basic");
    let nowhere = model.path("no-such-directory/dump.safetensors");
    model.refused(
        &["--dump", nowhere.to_str().unwrap()],
        110,
        &["dump.safetensors"],
    );
    let directory = model.path("directory");
    fs::create_dir(&directory).unwrap();
    model.refused(
        &["--dump", directory.to_str().unwrap()],
        110,
        &["directory"],
    );
}

#[test]
fn an_output_never_replaces_an_input_or_another_output() {
    let model = Spoilt::new("basic");
    let weights = model.model("model.safetensors");
    let before = fs::read(&weights).unwrap();
    let report = model.path("report.json");
    for target in [&weights, &model.path("tokens.json"), &report] {
        model.refused(
            &["--dump", target.to_str().unwrap()],
            2,
            &["would overwrite"],
        );
    }
    assert_eq!(fs::read(&weights).unwrap(), before);
}

#[test]
fn forced_ids_are_refused_by_tensor_and_value() {
    let model = Spoilt::new("basic");
    let tokens = model.tokens(r#"{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]}"#);
    let dump = model.path("dump.safetensors");
    let made = Command::new(env!("CARGO_BIN_EXE_m3"))
        .args(["logprobs", "--dtype", "f32", "--model"])
        .arg(model.path("model"))
        .arg("--tokens")
        .arg(&tokens)
        .arg("--dump")
        .arg(&dump)
        .output()
        .unwrap();
    assert!(
        made.status.success(),
        "{}",
        String::from_utf8_lossy(&made.stderr)
    );
    let bytes = fs::read(&dump).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let spoil = |name: &str, at: usize, value: i32| {
        let view = file.tensor(name).unwrap();
        let mut data = view.data().to_vec();
        data[4 * at..4 * at + 4].copy_from_slice(&value.to_le_bytes());
        let tensor =
            safetensors::tensor::TensorView::new(view.dtype(), view.shape().to_vec(), &data)
                .unwrap();
        let path = model.path("replay.safetensors");
        fs::write(
            &path,
            safetensors::serialize([(name, tensor)], None).unwrap(),
        )
        .unwrap();
        path
    };
    let first_expert = {
        let data = file.tensor("experts.1").unwrap().data()[..4].to_vec();
        i32::from_le_bytes(data.try_into().unwrap())
    };
    for (name, at, value, part) in [
        ("blocks.1", 0, 1, "holds 1"),
        ("blocks.1", 0, 5000, "holds 5000"),
        ("blocks.1", 0, -2, "holds -2"),
        ("experts.1", 0, 5000, "holds 5000"),
        ("experts.1", 0, -1, "holds -1"),
        ("experts.1", 1, first_expert, "twice"),
    ] {
        let path = spoil(name, at, value);
        model.refused(&["--replay", path.to_str().unwrap()], 2, &[name, part]);
    }
    model.refused(
        &["--replay", "absent.safetensors"],
        2,
        &["absent.safetensors"],
    );
}

#[test]
fn what_does_not_go_together_is_a_usage_error() {
    let model = Spoilt::new("basic");
    model.refused(&["--engine", "rollout", "--backward"], 2, &["--backward"]);
    model.refused(&["--temperature", "0"], 2, &["temperature 0"]);
    model.refused(&["--temperature", "1e-45"], 2, &["temperature"]);
    model.refused(&["--threads", "5000"], 2, &["--threads"]);
    model.refused(&["--prefill", "3"], 2, &["--prefill"]);
}

fn train(args: &[&str], code: i32, parts: &[&str]) {
    let output = Command::new(env!("CARGO_BIN_EXE_m3"))
        .arg("train")
        .args(args)
        .env_remove("M3_DEVICE")
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{part:?} is not in {stderr}");
    }
}

#[test]
fn a_recipe_or_a_directory_that_does_not_fit_is_refused_before_anything_runs() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = |text: &str| {
        let path = dir.path().join("recipe.toml");
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let out = dir.path().join("run");
    let out = out.to_str().unwrap();
    let unknown = recipe("[train]\nlearning_rat = 1e-3\n");
    train(
        &[&unknown, "--out", out],
        2,
        &["train.learning_rat", "did you mean learning_rate?"],
    );
    for (text, part) in [
        ("[train]\nmax_tokens = 1\n", "train.max_tokens 1"),
        ("[data]\nprompts = 10000000000\n", "data.prompts"),
        ("[data]\nsamples = 1\n", "data.samples is 1"),
        ("[model]\nconfig = \"minimax-m3\"\n", "weights"),
        ("[model]\ninit_std = -1.0\n", "model.init_std is -1"),
        ("[train]\nweight_decay = nan\n", "train.weight_decay is NaN"),
        (
            "[gates]\nreward_last_min = nan\n",
            "gates.reward_last_min is NaN",
        ),
        (
            "[rollout]\nmax_new_tokens = 100000000\n",
            "rollout.max_new_tokens",
        ),
    ] {
        train(&[&recipe(text), "--out", out], 2, &[part]);
    }
    let zero = recipe("[train]\nsteps = 0\n");
    train(&[&zero, "--out", out], 2, &["train.steps is 0"]);
    let both = recipe("[train]\ntrue_on_policy = true\n[rollout]\ntop_k = 2\n");
    train(&[&both, "--out", out], 2, &["true_on_policy", "top_k"]);
    train(&["--steps", "0", "--out", out], 2, &["--steps"]);
    assert!(
        !Path::new(out).exists(),
        "a refused recipe left a directory"
    );
    train(
        &["--out", dir.path().to_str().unwrap()],
        2,
        &["is not empty"],
    );
    let file = recipe("");
    train(
        &["--out", &format!("{file}/below")],
        110,
        &["cannot be written"],
    );
}

#[test]
fn a_missing_gpu_has_its_own_code() {
    // A machine with a driver runs instead; then there is nothing to refuse.
    if Path::new("/dev/nvidia0").exists() {
        return;
    }
    Spoilt::new("basic").refused(&["--device", "cuda"], 121, &["--device cpu"]);
    train(&["--device", "cuda:0"], 121, &["--device cpu"]);
}
