//! Random packs and selections.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{FileFailurePersistence, RngSeed, TestCaseResult, TestRunner};

use m3_harness::lab::cu_seqlens;
use m3_spec::inputs::{Distribution, Inputs};

/// Most tokens of a pack, so that every (query, key) pair can be looked at.
pub const TOKENS_MAX: usize = 2048;

/// Lengths at and around tiles of 32, 64 and 128, and blocks of 128.
const LENGTHS: [usize; 16] = [
    0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257,
];

/// Widths of key blocks: wider than, equal to and narrower than the tiles, and some that do not divide them.
const BLOCKS: [usize; 8] = [4, 8, 16, 24, 32, 64, 96, 128];

/// Widths of key tiles.
pub const KEY_TILES: [usize; 3] = [32, 64, 128];

/// How a query's blocks are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    /// Its own and random others, as the indexer does.
    Own,
    /// Any blocks, none at times.
    Any,
    /// All take the first block of their document.
    Sink,
    /// As many of the first as there are slots.
    First,
    /// Its own alone.
    Local,
}

/// A pack of documents, the attention over it, and a selection.
#[derive(Clone, Debug)]
pub struct Pack {
    pub lengths: Vec<usize>,
    /// Entries of cu_seqlens past the documents, which repeat the last value.
    pub unused: usize,
    /// Tokens after the last document.
    pub padding: usize,
    pub block: usize,
    pub topk: usize,
    pub kv_heads: usize,
    pub group: usize,
    pub head_dim: usize,
    pub key_tile: usize,
    pub query_tile: usize,
    pub head_splits: usize,
    pub choice: Choice,
    pub seed: u64,
}

/// Packs of at most `most` documents and `tokens` tokens.
pub fn packs(most: usize, tokens: usize) -> impl Strategy<Value = Pack> {
    let length = prop_oneof![
        4 => prop::sample::select(&LENGTHS[..]),
        1 => 1..tokens.min(700),
    ];
    let long = prop_oneof![
        7 => Just(None),
        1 => prop::sample::select(vec![tokens - 1, tokens, 1000.min(tokens)]).prop_map(Some),
    ];
    let documents = (vec(length, 1..=most), long).prop_map(move |(mut lengths, long)| {
        lengths.splice(0..0, long);
        let mut room = tokens;
        lengths.retain(|&length| {
            let fits = length <= room;
            room -= if fits { length } else { 0 };
            fits
        });
        lengths
    });
    let shape = (
        prop::sample::select(&BLOCKS[..]),
        1..=6_usize,
        1..=2_usize,
        1..=3_usize,
        prop::sample::select(vec![8, 32]),
    );
    let tiles = (
        prop::sample::select(&KEY_TILES[..]),
        prop::sample::select(vec![1, 16, 64, 100]),
        1..=2_usize,
    );
    let choice = prop::sample::select(vec![
        Choice::Own,
        Choice::Any,
        Choice::Sink,
        Choice::First,
        Choice::Local,
    ]);
    let ends = (0..3_usize, prop::sample::select(vec![0, 0, 1, 70]));
    (documents, ends, shape, tiles, choice, any::<u64>()).prop_map(
        |(lengths, (unused, padding), shape, tiles, choice, seed)| {
            let (block, topk, kv_heads, group, head_dim) = shape;
            let (key_tile, query_tile, head_splits) = tiles;
            Pack {
                lengths,
                unused,
                padding,
                block,
                topk,
                kv_heads,
                group,
                head_dim,
                key_tile,
                query_tile,
                head_splits: head_splits.min(group),
                choice,
                seed,
            }
        },
    )
}

impl Pack {
    /// Tokens, padding among them.
    pub fn tokens(&self) -> usize {
        self.covered() + self.padding
    }

    /// Tokens of documents.
    pub fn covered(&self) -> usize {
        self.lengths.iter().sum()
    }

    pub fn q_heads(&self) -> usize {
        self.kv_heads * self.group
    }

    pub fn cu_seqlens(&self) -> Vec<i32> {
        let mut ends = cu_seqlens(&self.lengths);
        ends.resize(ends.len() + self.unused, self.covered() as i32);
        ends
    }

    /// First token of each document.
    pub fn starts(&self) -> Vec<usize> {
        let ends = cu_seqlens(&self.lengths);
        ends[..self.lengths.len()]
            .iter()
            .map(|&x| x as usize)
            .collect()
    }

    /// Start and length of the document of each token of a document.
    pub fn documents(&self) -> Vec<(usize, usize)> {
        let documents = self.starts().into_iter().zip(&self.lengths);
        documents
            .flat_map(|(start, &length)| std::iter::repeat_n((start, length), length))
            .collect()
    }

    /// A selection `[Hkv, T, topk]`. What a query selects depends on its document's number and length, not on where
    /// the document lies.
    pub fn selection(&self) -> Vec<i32> {
        let mut ids = vec![-1; self.kv_heads * self.tokens() * self.topk];
        for (number, (start, &length)) in self.starts().into_iter().zip(&self.lengths).enumerate() {
            let inputs = Inputs::new(self.seed, &format!("blocks of document {number}"));
            for head in 0..self.kv_heads {
                let draws = inputs.integers(&format!("head {head}"), 1 << 30, length * self.topk);
                for (position, draws) in draws.chunks_exact(self.topk).enumerate() {
                    let row = (head * self.tokens() + start + position) * self.topk;
                    self.select(position / self.block, draws, &mut ids[row..][..self.topk]);
                }
            }
        }
        ids
    }

    fn select(&self, own: usize, draws: &[u32], ids: &mut [i32]) {
        let any = |&draw: &u32| draw as usize % (own + 1);
        let mut chosen: Vec<usize> = match self.choice {
            Choice::Own => draws[1..].iter().map(any).chain([own]).collect(),
            Choice::Any => {
                let count = draws[0] as usize / (own + 1) % (ids.len() + 1);
                draws[..count].iter().map(any).collect()
            }
            Choice::Sink => vec![0],
            Choice::First => (0..ids.len().min(own + 1)).collect(),
            Choice::Local => vec![own],
        };
        chosen.sort_unstable();
        chosen.dedup();
        for (id, block) in ids.iter_mut().zip(chosen) {
            *id = block as i32;
        }
    }

    /// Normal values in f32. Those of a document depend on its number, not on where it lies: `[T, width]`.
    pub fn normal(&self, label: &str, width: usize) -> Vec<f32> {
        let normal = Distribution::Normal { std: 1.0 };
        let draw = |number: usize, length: usize| {
            let case = format!("{label} of document {number}");
            Inputs::new(self.seed, &case).f32s(label, normal, length * width)
        };
        let documents = self.lengths.iter().copied().enumerate();
        let mut values: Vec<f32> = documents
            .flat_map(|(number, length)| draw(number, length))
            .collect();
        values.resize(self.tokens() * width, 0.5);
        values
    }
}

/// True at the scale that takes minutes.
pub fn full() -> bool {
    std::env::var("M3_TIER").is_ok_and(|tier| tier == "full")
}

/// Tries a property on `ci` packs, or on `full` of them.
pub fn holds<S: Strategy>(
    source: &'static str,
    [ci, all]: [u32; 2],
    packs: &S,
    property: impl Fn(S::Value) -> TestCaseResult,
) {
    let seed = std::env::var("M3_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let config = ProptestConfig {
        cases: if full() { all } else { ci },
        source_file: Some(source),
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        rng_seed: RngSeed::Fixed(seed.unwrap_or(0x5eed)),
        ..ProptestConfig::default()
    };
    if let Err(error) = TestRunner::new(config).run(packs, property) {
        panic!("{error}");
    }
}
