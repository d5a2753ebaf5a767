//! The gates of a run: what a step measured becomes verdict rows.

use m3_gate::record::VerdictRecord;
use m3_gate::{Case, Date, GateSet, Severity, Storage, Value, is_green, judge_value, parse_gates};

use m3_report::{GateRow, gate_rows};

use super::recipe::Recipe;
use crate::error::{Error, Result};

/// Gates of every run.
const RUN: &str = include_str!("../../../gates/run.toml");

/// Below this many steps the reward says nothing yet.
const REWARD_STEPS_MIN: usize = 20;

/// Verdicts of a run in the making.
pub struct RunGates {
    gates: GateSet,
    recipe: String,
    arch: String,
    /// Rows so far, in the order they were judged.
    pub verdicts: Vec<VerdictRecord>,
}

impl RunGates {
    /// The gates of every run and the recipe's own.
    ///
    /// # Errors
    /// [`Error::Input`] when a gate file does not parse.
    pub fn new(recipe: &Recipe, arch: &str, today: Date) -> Result<Self> {
        let refused = |error: m3_gate::GateError| Error::Input(error.to_string());
        let run = parse_gates("gates/run.toml", RUN, today).map_err(refused)?;
        let own = parse_gates("recipe", &reward_gates(recipe), today).map_err(refused)?;
        let gates = GateSet::new([run, own]).map_err(refused)?;
        let (recipe, arch) = (recipe.name.clone(), arch.to_owned());
        Ok(RunGates {
            gates,
            recipe,
            arch,
            verdicts: Vec::new(),
        })
    }

    /// Judges one number. The row carries the contract's gate name, and tells rows of one gate apart by its case.
    pub fn judge(&mut self, id: &str, step: Option<usize>, value: f64) {
        let Some(gate) = self.gates.gate(id) else {
            return;
        };
        let (name, part) = id.split_once('.').unwrap_or((id, ""));
        let recipe = &self.recipe;
        let case = if part.is_empty() {
            recipe.clone()
        } else {
            format!("{recipe}/{part}")
        };
        let judged = Case {
            name: &case,
            suite: "train",
            arch: &self.arch,
            dtype: Storage::F32,
        };
        let value = Value {
            value: Some(value),
            step: step.map(|step| step as u64),
            history: &[],
        };
        for mut row in judge_value(&self.gates, gate, &judged, value) {
            row.gate = name.to_owned();
            self.verdicts.push(row);
        }
    }

    /// Whether every block verdict is PASS or WAIVED.
    pub fn is_green(&self) -> bool {
        is_green(&self.verdicts)
    }

    /// A line per gate and part: worst verdict, worst value against its bound, rows.
    pub fn table(&self) -> String {
        let line = |row: &GateRow<'_>| {
            let worst = row.worst;
            let value = worst
                .value
                .map_or("-".into(), |value| format!("{value:.4e}"));
            let bound = format!(
                "{} {}",
                worst.op.map_or("", |op| op.name()),
                worst.bound_text
            );
            let shadow = if worst.severity == Severity::Shadow {
                " (shadow)"
            } else {
                ""
            };
            let (gate, case) = (&worst.gate, &worst.case);
            let (verdict, count) = (worst.verdict.name(), row.verdicts.len());
            format!("{verdict:<8} {gate:<15} {case:<18} {value:>11} {bound:<12} x{count}{shadow}\n")
        };
        gate_rows(&self.verdicts).iter().map(line).collect()
    }
}

fn reward_gates(recipe: &Recipe) -> String {
    let severity = if recipe.train.steps < REWARD_STEPS_MIN {
        "shadow"
    } else {
        "block"
    };
    let gate = |part: &str, op: &str, bound: f64, key: &str| {
        format!(
            "[[gate]]\nid = \"reward.{part}\"\nmetric = \"value\"\nop = \"{op}\"\nbound = {bound:?}\ncases = \"*\"\n\
             severity = \"{severity}\"\nsource = {{ kind = \"analytic\", why = \"recipe: gates.{key}\" }}\n"
        )
    };
    let gates = &recipe.gates;
    gate("first5", "<=", gates.reward_first_max, "reward_first_max")
        + &gate("last5", ">=", gates.reward_last_min, "reward_last_min")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gates(steps: usize) -> RunGates {
        let mut recipe = Recipe::echo().unwrap();
        recipe.train.steps = steps;
        RunGates::new(&recipe, "cpu", crate::today()).unwrap()
    }

    #[test]
    fn a_red_block_gate_turns_the_run_red_and_a_shadow_gate_does_not() {
        let mut run = gates(5);
        run.judge("weights_equal", Some(1), 0.0);
        run.judge("reward.last5", None, 0.1);
        assert!(run.is_green());
        run.judge("kl_k3", Some(1), f64::NAN);
        assert!(!run.is_green());
        assert!(run.table().contains("ERROR"));
    }

    #[test]
    fn rows_carry_the_names_of_the_contract() {
        let mut run = gates(60);
        run.judge("reward.last5", None, 0.9);
        run.judge("grad_norm.history", Some(3), 1.0);
        let rows: Vec<_> = run
            .verdicts
            .iter()
            .map(|row| (row.gate.as_str(), row.case.as_str()))
            .collect();
        assert_eq!(
            rows,
            [("reward", "echo/last5"), ("grad_norm", "echo/history")]
        );
        assert!(!run.verdicts.iter().any(|row| row.gate.contains('.')));
    }
}
