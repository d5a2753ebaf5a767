//! What is wrong, and where: kept with every verdict that is not PASS, so that a failure can be
//! read, and read again later, without the tensors.

use crate::gate::{Gate, Op};
use crate::metrics::{Metric, largest, relative_error, rms, same_value, twin_error};
use crate::operand::{Checked, Class, Operand, Operands};
use crate::storage::Storage;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Names a flat index in the model's own terms: `sequence 1, token 4097, kv head 2, key block 32
/// (tail, 3 of 128 keys)`. Parts are separated by `, `; a bracket says what kind of place it is.
pub type Decoder<'a> = &'a dyn Fn(usize) -> String;

/// Bad elements that are decoded to find where they gather; more are sampled evenly.
const LOCALITY_SAMPLES: usize = 4096;

/// Fewer bad elements than this gather nowhere: the worst one says it all.
const LOCALITY_BAD_MIN: usize = 4;

/// Distances in representable values between got and the reference rounded once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UlpHistogram {
    /// Same value.
    pub zero: u64,
    /// Neighbours.
    pub one: u64,
    /// Two apart.
    pub two: u64,
    /// Three or four apart.
    pub three_to_four: u64,
    /// Five or more apart, and every non-finite disagreement.
    pub five_up: u64,
}

/// The element that is furthest off in the gate's own metric; the first one on ties.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Worst {
    /// Flat index.
    pub index: usize,
    /// Index per axis.
    pub at: Vec<usize>,
    /// In the model's terms; empty without a decoder.
    pub terms: String,
    /// What is right.
    #[serde(with = "crate::record::number")]
    pub reference: f64,
    /// What came out.
    #[serde(with = "crate::record::number")]
    pub got: f64,
    /// Stored bits of the reference after one rounding.
    pub reference_bits: String,
    /// Stored bits of what came out.
    pub got_bits: String,
    /// Distance in representable values; `u64::MAX` when one side is not finite.
    pub ulp: u64,
}

/// A tensor under a red gate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// Extents of what came out.
    pub shape: Vec<usize>,
    /// How it is stored.
    pub storage: Storage,
    /// Elements compared.
    pub elements: usize,
    /// Elements further off than the bound lets all of them be.
    pub over: usize,
    /// NaN in what came out.
    pub nan: usize,
    /// Infinities in what came out.
    pub inf: usize,
    /// Furthest element.
    pub worst: Option<Worst>,
    /// Where the bad elements gather.
    pub locality: Option<String>,
    /// Distances.
    pub ulp: UlpHistogram,
}

impl Evidence {
    /// Looks at both sides as far as they can be laid beside each other; none when they cannot.
    pub(crate) fn gather(
        gate: &Gate,
        operands: &Operands<'_>,
        decoder: Option<Decoder<'_>>,
    ) -> Option<Evidence> {
        let (got, reference) = (operands.got?, operands.reference?);
        let twin = operands.twin.filter(|t| t.values.len() == got.values.len());
        let laid_out = got.shape == reference.shape && got.values.len() == reference.values.len();
        if !laid_out || got.values.is_empty() {
            return None;
        }
        let pair = Checked {
            got,
            reference,
            twin,
            storage: operands.storage,
        };
        let limit = element_limit(gate, &pair);
        let badness: Vec<f64> = (0..got.values.len())
            .map(|i| badness(gate, &pair, i))
            .collect();
        let is_bad = |i: &usize| match limit {
            Some(limit) => !Op::Le.holds(badness[*i], limit),
            None => badness[*i] > 0.0,
        };
        let bad: Vec<usize> = (0..badness.len()).filter(is_bad).collect();
        let count = |class: fn(f64) -> bool| got.values.iter().filter(|&&x| class(x)).count();
        Some(Evidence {
            shape: got.shape.to_vec(),
            storage: operands.storage,
            elements: got.values.len(),
            over: bad.len(),
            nan: count(f64::is_nan),
            inf: count(f64::is_infinite),
            worst: worst(&badness).map(|i| describe(i, got, reference, operands.storage, decoder)),
            locality: decoder.and_then(|decode| locality(&bad, badness.len(), decode)),
            ulp: histogram(got, reference, operands.storage),
        })
    }
}

/// How far off element `i` is, in the unit that the metric works in; +Inf where masks disagree.
fn badness(gate: &Gate, pair: &Checked<'_>, i: usize) -> f64 {
    let (got, reference) = (pair.got.values[i], pair.reference.values[i]);
    if Class::of(got) != Class::of(reference) {
        return f64::INFINITY;
    }
    let off = |differs: bool| if differs { 1.0 } else { 0.0 };
    match gate.metric {
        Metric::FiniteMatch => 0.0,
        _ if got.is_nan() => f64::INFINITY,
        Metric::Bitwise => off(got.to_bits() != reference.to_bits()),
        Metric::MismatchCount | Metric::AgreeRate => off(!same_value(pair, i)),
        _ if got == reference => 0.0,
        Metric::MaxUlp => pair.storage.ulp_distance(got, reference) as f64,
        Metric::MaxRel => relative_error(got, reference, gate.ratio_terms().floor),
        _ => (got - reference).abs(),
    }
}

/// The error that, granted to every element alike, would just keep the gate: elements above it are
/// the ones that broke it. None where any difference is a fault.
fn element_limit(gate: &Gate, pair: &Checked<'_>) -> Option<f64> {
    let (bound, floor) = (gate.limit.as_ref()?.bound, gate.ratio_terms().floor);
    let finite = pair
        .reference
        .values
        .iter()
        .copied()
        .filter(|r| r.is_finite());
    match gate.metric {
        Metric::MaxAbs | Metric::MaxRel | Metric::MaxUlp => Some(bound),
        Metric::RmsRatio | Metric::ErrRatio => {
            Some(bound * (twin_error(gate.metric, pair) + floor))
        }
        Metric::NormRel => Some(bound * (rms(finite) + floor)),
        // A relative error of r tilts a vector by at most r, which opens a cosine gap of r²/2.
        Metric::CosineGap => Some((2.0 * bound).sqrt() * rms(finite)),
        _ => None,
    }
}

fn worst(badness: &[f64]) -> Option<usize> {
    let top = largest(badness.iter().copied());
    if top == 0.0 {
        None
    } else {
        badness.iter().position(|&b| b == top)
    }
}

fn describe(
    index: usize,
    got: Operand<'_>,
    reference: Operand<'_>,
    storage: Storage,
    decoder: Option<Decoder<'_>>,
) -> Worst {
    let (g, r) = (got.values[index], reference.values[index]);
    Worst {
        index,
        at: unravel(index, got.shape),
        terms: decoder.map(|decode| decode(index)).unwrap_or_default(),
        reference: r,
        got: g,
        reference_bits: storage.bits_text(r),
        got_bits: storage.bits_text(g),
        ulp: storage.ulp_distance(g, r),
    }
}

fn unravel(mut index: usize, shape: &[usize]) -> Vec<usize> {
    let mut at = vec![0; shape.len()];
    for (axis, &extent) in shape.iter().enumerate().rev() {
        at[axis] = index % extent;
        index /= extent;
    }
    at
}

fn histogram(got: Operand<'_>, reference: Operand<'_>, storage: Storage) -> UlpHistogram {
    let mut histogram = UlpHistogram::default();
    for (&g, &r) in got.values.iter().zip(reference.values) {
        let bucket = match storage.ulp_distance(g, r) {
            0 => &mut histogram.zero,
            1 => &mut histogram.one,
            2 => &mut histogram.two,
            3 | 4 => &mut histogram.three_to_four,
            _ => &mut histogram.five_up,
        };
        *bucket += 1;
    }
    histogram
}

/// A place that an element lies in: `kv head 2`, or a kind of place such as `tail key blocks`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    is_kind: bool,
    name: String,
}

/// Finds the place that holds at least half of the bad elements while holding a smaller part of
/// all elements, and is the most over-represented one; on a tie a kind of place says more.
fn locality(bad: &[usize], elements: usize, decode: Decoder<'_>) -> Option<String> {
    if bad.len() < LOCALITY_BAD_MIN {
        return None;
    }
    let stride = elements.div_ceil(LOCALITY_SAMPLES);
    let everything: Vec<usize> = (0..elements).step_by(stride).collect();
    let stride = bad.len().div_ceil(LOCALITY_SAMPLES);
    let sampled: Vec<usize> = bad.iter().copied().step_by(stride).collect();
    let (all, here) = (tally(&everything, decode), tally(&sampled, decode));
    let excess = |place: &Place, share: f64| {
        share
            - all
                .get(place)
                .map_or(0.0, |&n| n as f64 / everything.len() as f64)
    };
    let candidates = here.iter().filter_map(|(place, &count)| {
        let share = count as f64 / sampled.len() as f64;
        let excess = excess(place, share);
        (share >= 0.5 && excess >= 0.1).then_some((excess, place, count))
    });
    let best = candidates.max_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(b.1)));
    let of = if stride == 1 { "" } else { " sampled" };
    Some(match best {
        Some((_, place, count)) => format!("{count} of {}{of} in {}", sampled.len(), place.name),
        None => "spread: no token, head or block holds half of them".to_owned(),
    })
}

/// Counts of every place that the decoded elements name.
fn tally(indices: &[usize], decode: Decoder<'_>) -> BTreeMap<Place, usize> {
    let mut counts = BTreeMap::new();
    for &i in indices {
        for place in places(&decode(i)) {
            *counts.entry(place).or_insert(0) += 1;
        }
    }
    counts
}

/// `kv head 2, key block 32 (tail, 3 of 128 keys)` → `kv head 2`, `key block 32`, `tail key blocks`.
fn places(terms: &str) -> Vec<Place> {
    let mut places = Vec::new();
    let mut rest = terms;
    while !rest.is_empty() {
        let outside = rest.find([',', '(']).unwrap_or(rest.len());
        let name = rest[..outside].trim();
        if !name.is_empty() {
            places.push(Place {
                is_kind: false,
                name: name.to_owned(),
            });
        }
        rest = &rest[outside..];
        if let Some(inner) = rest.strip_prefix('(') {
            let close = inner.find(')').unwrap_or(inner.len());
            let kind = inner[..close].split(',').next().unwrap_or_default().trim();
            let noun = name.trim_end_matches(|c: char| c.is_ascii_digit()).trim();
            places.push(Place {
                is_kind: true,
                name: format!("{kind} {noun}s"),
            });
            rest = inner.get(close + 1..).unwrap_or_default();
        } else {
            rest = rest.strip_prefix(',').unwrap_or(rest);
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_name_places_and_kinds_of_places() {
        let names: Vec<String> = places("kv head 2, key block 32 (tail, 3 of 128 keys), dim 7")
            .into_iter()
            .map(|place| place.name)
            .collect();
        assert_eq!(
            names,
            ["kv head 2", "key block 32", "tail key blocks", "dim 7"]
        );
        assert!(places("").is_empty());
        assert_eq!(places("row 3 (").len(), 2);
    }

    #[test]
    fn faults_are_placed_where_they_gather_and_not_where_everything_is() {
        let decode = |i: usize| format!("sequence 0, token {}, head {}", i / 8, i % 8);
        let head_three: Vec<usize> = (0..64).map(|t| t * 8 + 3).collect();
        let at = |bad: &[usize]| locality(bad, 512, &decode);
        assert_eq!(at(&head_three).as_deref(), Some("64 of 64 in head 3"));
        let everywhere: Vec<usize> = (0..512).collect();
        let spread = "spread: no token, head or block holds half of them";
        assert_eq!(at(&everywhere).as_deref(), Some(spread));
        assert_eq!(at(&[5]), None);
    }
}
