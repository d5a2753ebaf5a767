//! Recipes: TOML tables `[model] [data] [rollout] [train] [sync] [gates]`, every key optional.

use std::path::{Path, PathBuf};

use m3_spec::config::TextConfig;
use m3_spec::dtype::DType;
use serde::Deserialize;
use toml::Table;

use super::echo;
use crate::error::{Error, Result};

/// Samples of a step that are held in memory together.
const SAMPLES_MAX: usize = 1 << 20;

/// Longest response.
const TOKENS_MAX: usize = 1 << 20;

/// Largest model that is initialised at random: the optimizer's state of more does not fit a workstation.
const RANDOM_WEIGHTS_MAX: usize = 1_000_000_000;

/// The recipe that runs when none is named.
const ECHO: &str = include_str!("../../recipes/echo.toml");

/// A whole recipe.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Recipe {
    /// Name for directories and verdicts: the file's stem.
    #[serde(skip)]
    pub name: String,
    /// What is trained.
    pub model: ModelTable,
    /// What it is trained on.
    pub data: DataTable,
    /// How responses are sampled.
    pub rollout: RolloutTable,
    /// How it is trained.
    pub train: TrainTable,
    /// How weights travel.
    pub sync: SyncTable,
    /// Bounds that belong to the recipe.
    pub gates: GatesTable,
}

/// `[model]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelTable {
    /// Built-in configuration to initialise at random; with `path`, unused.
    pub config: String,
    /// Directory of a released-format checkpoint to start from.
    pub path: Option<PathBuf>,
    /// Standard deviation of initial weights.
    pub init_std: f64,
    /// Storage dtype: `bf16` or `f32`.
    pub dtype: String,
}

impl Default for ModelTable {
    fn default() -> Self {
        ModelTable {
            config: "echo".into(),
            path: None,
            init_std: 0.1,
            dtype: "bf16".into(),
        }
    }
}

/// `[data]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataTable {
    /// Task: `echo`.
    pub task: String,
    /// Prompts of a step.
    pub prompts: usize,
    /// Samples of a prompt.
    pub samples: usize,
}

impl Default for DataTable {
    fn default() -> Self {
        DataTable {
            task: "echo".into(),
            prompts: 16,
            samples: 16,
        }
    }
}

/// `[rollout]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RolloutTable {
    /// Divisor of the logits, on both sides.
    pub temperature: f32,
    /// Tokens of a response.
    pub max_new_tokens: usize,
    /// Probability mass that is kept.
    pub top_p: f32,
    /// Ids that are kept; 0 keeps all.
    pub top_k: usize,
}

impl Default for RolloutTable {
    fn default() -> Self {
        RolloutTable {
            temperature: 1.0,
            max_new_tokens: 8,
            top_p: 1.0,
            top_k: 0,
        }
    }
}

/// `[train]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainTable {
    /// Steps.
    pub steps: usize,
    /// Learning rate, constant.
    pub learning_rate: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// β₁ of AdamW.
    pub beta1: f32,
    /// β₂ of AdamW.
    pub beta2: f32,
    /// Global gradient norm above which gradients shrink.
    pub max_norm: f32,
    /// Lower clip of the ratio.
    pub eps_clip: f32,
    /// Upper clip of the ratio.
    pub eps_clip_high: f32,
    /// Tokens of a micro-batch.
    pub max_tokens: usize,
    /// Whether activations are recomputed for the gradients.
    pub recompute: bool,
    /// Whether trainer and engine agree bit for bit, so that the log-prob gap must be exactly 0.
    pub true_on_policy: bool,
}

impl Default for TrainTable {
    fn default() -> Self {
        TrainTable {
            steps: 60,
            learning_rate: 2e-3,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.98,
            max_norm: 1.0,
            eps_clip: 0.2,
            eps_clip_high: 0.28,
            max_tokens: 4096,
            recompute: false,
            true_on_policy: false,
        }
    }
}

/// `[sync]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SyncTable {
    /// Bytes of a bucket.
    pub bucket_bytes: usize,
}

impl Default for SyncTable {
    fn default() -> Self {
        SyncTable {
            bucket_bytes: 512 << 20,
        }
    }
}

/// `[gates]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatesTable {
    /// Mean reward of the first five steps stays below.
    pub reward_first_max: f64,
    /// Mean reward of the last five steps lies above.
    pub reward_last_min: f64,
}

impl Default for GatesTable {
    fn default() -> Self {
        GatesTable {
            reward_first_max: 0.3,
            reward_last_min: 0.7,
        }
    }
}

/// Keys of every table, for refusals that name the one that was meant.
const KEYS: [(&str, &[&str]); 6] = [
    ("model", &["config", "path", "init_std", "dtype"]),
    ("data", &["task", "prompts", "samples"]),
    (
        "rollout",
        &["temperature", "max_new_tokens", "top_p", "top_k"],
    ),
    (
        "train",
        &[
            "steps",
            "learning_rate",
            "weight_decay",
            "beta1",
            "beta2",
            "max_norm",
            "eps_clip",
            "eps_clip_high",
            "max_tokens",
            "recompute",
            "true_on_policy",
        ],
    ),
    ("sync", &["bucket_bytes"]),
    ("gates", &["reward_first_max", "reward_last_min"]),
];

impl Recipe {
    /// The embedded recipe.
    ///
    /// # Errors
    /// Never for the committed text; a test reads it.
    pub fn echo() -> Result<Self> {
        Recipe::parse("echo", ECHO).map_err(|what| Error::Input(format!("echo: {what}")))
    }

    /// Reads a recipe file.
    ///
    /// # Errors
    /// [`Error::Input`] naming the file, the key and what was meant.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::file(path, format_args!("cannot be read: {error}")))?;
        let name = path
            .file_stem()
            .map_or("recipe".into(), |stem| stem.to_string_lossy().into_owned());
        Recipe::parse(&name, &text).map_err(|what| Error::file(path, what))
    }

    fn parse(name: &str, text: &str) -> std::result::Result<Self, String> {
        let table: Table = text
            .parse()
            .map_err(|error: toml::de::Error| one_line(&error))?;
        unknown(&table)?;
        let recipe: Recipe = table
            .try_into()
            .map_err(|error: toml::de::Error| one_line(&error))?;
        Ok(Recipe {
            name: name.into(),
            ..recipe
        })
    }

    /// Refuses settings that do not fit each other.
    ///
    /// # Errors
    /// [`Error::Input`] naming the keys and their values.
    pub fn check(&self) -> Result<()> {
        let Recipe {
            model,
            data,
            rollout,
            train,
            gates,
            ..
        } = self;
        let refused = |what: String| Err(Error::Input(format!("recipe {}: {what}", self.name)));
        if data.task != "echo" {
            return refused(format!(
                "data.task {:?} is not known; there is \"echo\"",
                data.task
            ));
        }
        self.dtype()?;
        for (key, value, least, most) in [
            ("train.steps", train.steps, 1, usize::MAX),
            ("data.prompts", data.prompts, 1, SAMPLES_MAX),
            // One sample has nothing to be better than.
            ("data.samples", data.samples, 2, SAMPLES_MAX),
            (
                "rollout.max_new_tokens",
                rollout.max_new_tokens,
                1,
                TOKENS_MAX,
            ),
            ("train.max_tokens", train.max_tokens, 1, usize::MAX),
            ("sync.bucket_bytes", self.sync.bucket_bytes, 1, usize::MAX),
        ] {
            if value < least {
                return refused(format!("{key} is {value}; it must be at least {least}"));
            }
            if value > most {
                return refused(format!("{key} is {value}; it must be at most {most}"));
            }
        }
        if data.prompts * data.samples > SAMPLES_MAX {
            let (prompts, samples) = (data.prompts, data.samples);
            return refused(format!(
                "data.prompts {prompts} times data.samples {samples} is above {SAMPLES_MAX}"
            ));
        }
        for (key, value) in [
            ("rollout.temperature", f64::from(rollout.temperature)),
            ("train.learning_rate", f64::from(train.learning_rate)),
            ("train.max_norm", f64::from(train.max_norm)),
            ("model.init_std", model.init_std),
        ] {
            if !(value > 0.0 && value.is_finite()) {
                return refused(format!("{key} is {value}; it must be above 0 and finite"));
            }
        }
        for (key, value) in [
            ("train.weight_decay", f64::from(train.weight_decay)),
            ("train.eps_clip", f64::from(train.eps_clip)),
            ("train.eps_clip_high", f64::from(train.eps_clip_high)),
            ("gates.reward_first_max", gates.reward_first_max),
            ("gates.reward_last_min", gates.reward_last_min),
        ] {
            if !(value >= 0.0 && value.is_finite()) {
                return refused(format!(
                    "{key} is {value}; it must be at least 0 and finite"
                ));
            }
        }
        for (key, value) in [("train.beta1", train.beta1), ("train.beta2", train.beta2)] {
            if !(0.0..1.0).contains(&value) {
                return refused(format!("{key} is {value}; it must be from 0 to below 1"));
            }
        }
        if train.true_on_policy && (rollout.top_p != 1.0 || rollout.top_k != 0) {
            return refused(
                "train.true_on_policy needs rollout.top_p 1 and rollout.top_k 0".into(),
            );
        }
        Ok(())
    }

    /// Refuses a model that the recipe's task and lengths do not fit.
    ///
    /// # Errors
    /// [`Error::Input`] naming the keys and the model's numbers.
    pub fn check_model(&self, config: &TextConfig) -> Result<()> {
        let refused = |what: String| Err(Error::Input(format!("recipe {}: {what}", self.name)));
        let total = echo::PROMPT_TOKENS + self.rollout.max_new_tokens;
        let (positions, vocab) = (config.max_position_embeddings, config.vocab_size);
        if total > positions.min(self.train.max_tokens) {
            let max_tokens = self.train.max_tokens;
            return refused(format!(
                "prompt and rollout.max_new_tokens are {total} tokens, above train.max_tokens {max_tokens} or the \
                 model's {positions} positions"
            ));
        }
        if vocab < echo::VOCAB_MIN {
            let least = echo::VOCAB_MIN;
            return refused(format!(
                "the task needs {least} token ids, the model has {vocab}"
            ));
        }
        let weights: usize = m3_spec::tensors::tensors(config)
            .iter()
            .map(|tensor| tensor.elements())
            .sum();
        if self.model.path.is_none() && weights > RANDOM_WEIGHTS_MAX {
            return refused(format!(
                "model.config {:?} has {weights} weights; random ones are made up to {RANDOM_WEIGHTS_MAX}, name a \
                 checkpoint with model.path",
                self.model.config
            ));
        }
        Ok(())
    }

    /// Storage dtype.
    ///
    /// # Errors
    /// [`Error::Input`] for another word than `bf16` or `f32`.
    pub fn dtype(&self) -> Result<DType> {
        match self.model.dtype.as_str() {
            "bf16" => Ok(DType::BF16),
            "f32" => Ok(DType::F32),
            other => Err(Error::Input(format!(
                "recipe {}: model.dtype {other:?} must be \"bf16\" or \"f32\"",
                self.name
            ))),
        }
    }
}

/// The first key that no table has, with the nearest that exists.
fn unknown(table: &Table) -> std::result::Result<(), String> {
    let tables: Vec<&str> = KEYS.iter().map(|(name, _)| *name).collect();
    for (name, content) in table {
        let Some((_, keys)) = KEYS.iter().find(|(known, _)| known == name) else {
            return Err(format!("unknown table [{name}]; {}", meant(name, &tables)));
        };
        for key in content
            .as_table()
            .into_iter()
            .flat_map(|content| content.keys())
        {
            if !keys.contains(&key.as_str()) {
                return Err(format!("unknown key {name}.{key}; {}", meant(key, keys)));
            }
        }
    }
    Ok(())
}

fn meant(word: &str, known: &[&str]) -> String {
    let nearest = known
        .iter()
        .max_by(|a, b| strsim::jaro_winkler(word, a).total_cmp(&strsim::jaro_winkler(word, b)));
    match nearest {
        Some(near) if strsim::jaro_winkler(word, near) > 0.7 => format!("did you mean {near}?"),
        _ => format!("there are {}", known.join(", ")),
    }
}

fn one_line(error: &toml::de::Error) -> String {
    error.message().replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_recipe_is_read_and_fits() {
        let recipe = Recipe::echo().unwrap();
        recipe.check().unwrap();
        assert_eq!((recipe.train.steps, recipe.train.learning_rate), (60, 2e-3));
        assert!(recipe.train.true_on_policy);
    }

    #[test]
    fn every_listed_key_is_a_field_and_the_other_way_round() {
        for (table, keys) in KEYS {
            for key in keys {
                // A wrong type is refused only if the key is known to the reader.
                let text = format!("[{table}]\n{key} = {{}}\n");
                let refused = toml::from_str::<Recipe>(&text).unwrap_err().to_string();
                assert!(
                    !refused.contains("unknown field"),
                    "{table}.{key}: {refused}"
                );
            }
            let refused = toml::from_str::<Recipe>(&format!("[{table}]\nzzz = 1\n"));
            let refused = refused.unwrap_err().to_string();
            let fields = refused
                .split("expected")
                .nth(1)
                .unwrap_or_default()
                .matches('`')
                .count();
            assert_eq!(fields / 2, keys.len(), "[{table}]: {refused}");
        }
    }

    #[test]
    fn an_unknown_key_says_which_was_meant() {
        let refused = Recipe::parse("x", "[train]\nlearning_rat = 1e-3\n").unwrap_err();
        assert_eq!(
            refused,
            "unknown key train.learning_rat; did you mean learning_rate?"
        );
        let refused = Recipe::parse("x", "[trian]\n").unwrap_err();
        assert_eq!(refused, "unknown table [trian]; did you mean train?");
    }

    #[test]
    fn impossible_settings_are_refused_by_key() {
        let check = |text: &str| {
            Recipe::parse("x", text)
                .unwrap()
                .check()
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            check("[train]\nsteps = 0\n"),
            "recipe x: train.steps is 0; it must be at least 1"
        );
        assert_eq!(
            check("[rollout]\ntemperature = 0.0\n"),
            "recipe x: rollout.temperature is 0; it must be above 0 and finite"
        );
        let both = "[train]\ntrue_on_policy = true\n[rollout]\ntop_k = 4\n";
        assert!(check(both).contains("true_on_policy needs"));
    }
}
