//! A step as a list of actions. One process runs every stage today; a pipeline gives each rank its own part of the list.

use std::ops::Range;

/// What is done to one micro-batch at one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Runs the stage's layers.
    Forward,
    /// Runs them again to rebuild what was dropped after the forward pass.
    Recompute,
    /// Runs their gradients.
    Backward,
}

/// An entry of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Action {
    /// Micro-batch, from 0.
    pub micro_batch: usize,
    /// Stage, from 0.
    pub stage: usize,
    /// What is done.
    pub work: Work,
}

/// Which activations survive the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Everything that gradients read.
    All,
    /// The stages' inputs; the rest is recomputed, stage by stage.
    Inputs,
}

/// Layers of every stage, one stage a layer: what recomputation rebuilds at a time.
pub fn layer_stages(layers: usize) -> Vec<Range<usize>> {
    (0..layers).map(|layer| layer..layer + 1).collect()
}

/// Forward passes alone.
pub fn forward_only(micro_batches: usize, stages: usize) -> Vec<Action> {
    let forward = |micro_batch| {
        (0..stages).map(move |stage| Action {
            micro_batch,
            stage,
            work: Work::Forward,
        })
    };
    (0..micro_batches).flat_map(forward).collect()
}

/// Forward and backward of every micro-batch, one after another.
pub fn sequential(micro_batches: usize, stages: usize, keep: Keep) -> Vec<Action> {
    let mut actions = Vec::new();
    for micro_batch in 0..micro_batches {
        let action = |stage, work| Action {
            micro_batch,
            stage,
            work,
        };
        actions.extend((0..stages).map(|stage| action(stage, Work::Forward)));
        for stage in (0..stages).rev() {
            if keep == Keep::Inputs {
                actions.push(action(stage, Work::Recompute));
            }
            actions.push(action(stage, Work::Backward));
        }
    }
    actions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recomputation_comes_right_before_a_stage_runs_backward() {
        let works: Vec<_> = sequential(1, 2, Keep::Inputs)
            .iter()
            .map(|a| (a.stage, a.work))
            .collect();
        let expected = [
            (0, Work::Forward),
            (1, Work::Forward),
            (1, Work::Recompute),
            (1, Work::Backward),
            (0, Work::Recompute),
            (0, Work::Backward),
        ];
        assert_eq!(works, expected);
        assert_eq!(sequential(3, 2, Keep::All).len(), 12);
        assert!(
            forward_only(2, 2)
                .iter()
                .all(|action| action.work == Work::Forward)
        );
    }
}
