//! From rewards to advantages: each reward against the others of its group (GRPO).

use std::collections::BTreeMap;

/// Added to the standard deviation.
const STD_EPS: f64 = 1e-6;

/// (r − mean) / (std + 1e-6) within each group, with the unbiased standard deviation.
///
/// `None` is a sample without a reward: it takes no part and gets 0. A group with fewer than two rewards, or whose
/// rewards are all equal, gets exactly 0: a rounded mean would otherwise leave a remainder that the tiny deviation
/// blows up.
pub fn group_advantages(rewards: &[Option<f32>], groups: &[usize]) -> Vec<f32> {
    let mut members: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for (reward, &group) in rewards.iter().zip(groups) {
        let rewards = members.entry(group).or_default();
        rewards.extend(reward.map(f64::from));
    }
    let scales: BTreeMap<usize, Option<(f64, f64)>> = members
        .iter()
        .map(|(&group, rewards)| (group, mean_and_std(rewards)))
        .collect();
    rewards
        .iter()
        .zip(groups)
        .map(
            |(reward, group)| match (reward, scales.get(group).copied().flatten()) {
                (Some(reward), Some((mean, std))) => {
                    ((f64::from(*reward) - mean) / (std + STD_EPS)) as f32
                }
                _ => 0.0,
            },
        )
        .collect()
}

/// None where every advantage is 0.
fn mean_and_std(rewards: &[f64]) -> Option<(f64, f64)> {
    let (&first, rest) = rewards.split_first()?;
    if rest.iter().all(|&reward| reward == first) {
        return None;
    }
    let count = rewards.len() as f64;
    let mean = rewards.iter().sum::<f64>() / count;
    let squares: f64 = rewards.iter().map(|reward| (reward - mean).powi(2)).sum();
    Some((mean, (squares / (count - 1.0)).sqrt()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_fractional_rewards_give_no_advantage() {
        assert_eq!(group_advantages(&[Some(0.1); 16], &[3; 16]), [0.0; 16]);
    }

    #[test]
    fn deviations_are_unbiased_and_groups_apart() {
        let rewards = [Some(1.0), Some(0.0), Some(5.0), None, Some(0.0)];
        let advantages = group_advantages(&rewards, &[0, 0, 1, 0, 1]);
        let expected = 0.5 / (0.5f64.sqrt() + STD_EPS);
        assert_eq!(advantages[0], expected as f32);
        assert_eq!(advantages[1], -expected as f32);
        assert_eq!(advantages[2], -advantages[4]);
        assert_eq!(advantages[3], 0.0);
    }

    #[test]
    fn a_group_of_one_learns_nothing() {
        assert_eq!(group_advantages(&[Some(1.0), None], &[0, 0]), [0.0, 0.0]);
    }
}
