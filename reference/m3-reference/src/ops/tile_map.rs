//! What a selection means: the (query, key) pairs that attention may look at, and the same pairs seen from a block.
//!
//! A kernel's tile map, CSR and work list are right iff they cover exactly these pairs.

use crate::math::{index, sequences};

/// Sizes.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// T
    pub tokens: usize,
    /// Hi, one for each KV head
    pub index_heads: usize,
    /// Keys a block.
    pub block: usize,
    /// Ids a row.
    pub topk: usize,
}

/// What the op reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes.
    pub params: Params,
    /// `[Hi, T, topk]`, local to the sequence, -1 where there is none
    pub block_ids: &'a [i32],
    /// `[B+1]`
    pub cu_seqlens: &'a [i32],
}

/// A selection written out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Visible keys of each row, as tokens of the pack, ascending: `[Hi, T]` lists.
    pub keys: Vec<Vec<usize>>,
    /// Blocks of all sequences in order, then by head: `[Hi, blocks]` lists of the queries that selected a block, as
    /// tokens of the pack, ascending.
    pub queries: Vec<Vec<usize>>,
}

/// Both views of the selection.
pub fn forward(inputs: &Inputs) -> Output {
    let Params {
        tokens,
        index_heads,
        block,
        ..
    } = inputs.params;
    let mut output = Output {
        keys: Vec::new(),
        queries: Vec::new(),
    };
    for head in 0..index_heads {
        output
            .keys
            .extend((0..tokens).map(|token| keys_of(inputs, head, token)));
        for sequence in sequences(inputs.cu_seqlens) {
            for b in 0..sequence.len().div_ceil(block) {
                let selects =
                    |query: &usize| chosen(inputs, head, *query).any(|chosen| chosen == b);
                output
                    .queries
                    .push(sequence.clone().filter(selects).collect());
            }
        }
    }
    output
}

/// Keys of the selected blocks that lie in the query's sequence and not after it.
pub fn keys_of(inputs: &Inputs, head: usize, token: usize) -> Vec<usize> {
    let block = inputs.params.block;
    let Some(sequence) = sequences(inputs.cu_seqlens).find(|s| s.contains(&token)) else {
        return Vec::new();
    };
    let first = |b: usize| sequence.start + b * block;
    chosen(inputs, head, token)
        .flat_map(|b| first(b)..(first(b) + block).min(token + 1))
        .collect()
}

fn chosen<'a>(inputs: &Inputs<'a>, head: usize, token: usize) -> impl Iterator<Item = usize> + 'a {
    let Params { tokens, topk, .. } = inputs.params;
    let ids: &'a [i32] = &inputs.block_ids[(head * tokens + token) * topk..][..topk];
    ids.iter().filter(|&&id| id != -1).map(|&id| index(id))
}
