//! From a flat index to the model's words: sequence, token, head, block.

use crate::op_spec::{TensorArg, Word};

/// What a pack looks like; whatever is absent is left out of the words.
#[derive(Clone, Copy, Debug, Default)]
pub struct Layout<'a> {
    /// First token of every sequence, and the number of tokens.
    pub cu_seqlens: Option<&'a [i32]>,
    /// Keys per block.
    pub block_size: Option<usize>,
    /// First row of every expert, and the number of rows.
    pub expert_offsets: Option<&'a [i32]>,
}

/// The coordinates of a flat, row-major index; `None` outside the shape.
pub fn coordinates(shape: &[usize], flat: usize) -> Option<Vec<usize>> {
    if flat >= shape.iter().product() {
        return None;
    }
    let mut rest = flat;
    let mut coordinates = vec![0; shape.len()];
    for (coordinate, &extent) in coordinates.iter_mut().zip(shape).rev() {
        *coordinate = rest % extent;
        rest /= extent;
    }
    Some(coordinates)
}

/// An element in words, such as
/// `dk[8196, 2, 77] = sequence 1, token 4097, kv head 2, key block 32 (tail, 3 of 128 keys)`.
///
/// `shape` is the tensor's own; `None` if `flat` lies outside of it or its rank is not the spec's.
pub fn describe(
    tensor: &TensorArg,
    shape: &[usize],
    flat: usize,
    layout: &Layout,
) -> Option<String> {
    if shape.len() != tensor.shape.len() {
        return None;
    }
    let coordinates = coordinates(shape, flat)?;
    let words = words(tensor, &coordinates, layout);
    let element = format!("{}{coordinates:?}", tensor.name);
    Some(if words.is_empty() {
        element
    } else {
        format!("{element} = {}", words.join(", "))
    })
}

/// Where a token stands: its sequence, its position in it, and the sequence's length.
struct Position {
    sequence: usize,
    token: usize,
    len: usize,
}

fn words(tensor: &TensorArg, coordinates: &[usize], layout: &Layout) -> Vec<String> {
    let mut first = Vec::new();
    let mut middle = Vec::new();
    let mut last = Vec::new();
    let mut position = None;
    for (dim, &c) in tensor.shape.iter().zip(coordinates) {
        if matches!(dim.word, Word::Token | Word::KeyToken) {
            position = locate(c, layout.cu_seqlens);
            first.push(token_words(c, position.as_ref(), layout));
        }
    }
    for (dim, &c) in tensor.shape.iter().zip(coordinates) {
        match dim.word {
            Word::Plain | Word::Token => {}
            Word::KeyToken => {
                if let (Some(p), Some(size)) = (&position, layout.block_size) {
                    last.push(block_words(p.token / size, size, p.len));
                }
            }
            Word::Block => last.push(scored_block_words(c, position.as_ref(), layout)),
            Word::Row => middle.push(row_words(c, layout.expert_offsets)),
            Word::Sequence => middle.push(format!("boundary of sequence {c}")),
            Word::Head => middle.push(format!("head {c}")),
            Word::QHead => middle.push(format!("q head {c}")),
            Word::KvHead => middle.push(format!("kv head {c}")),
            Word::IndexHead => middle.push(format!("index head {c}")),
            Word::Slot => middle.push(format!("slot {c}")),
            Word::Expert => middle.push(format!("expert {c}")),
            Word::ExpertSlot => middle.push(format!("expert slot {c}")),
            Word::VocabId => middle.push(format!("vocab id {c}")),
        }
    }
    first.into_iter().chain(middle).chain(last).collect()
}

/// The last sequence that starts at or before the token and ends after it.
fn locate(token: usize, cu_seqlens: Option<&[i32]>) -> Option<Position> {
    let bounds = cu_seqlens?.windows(2).enumerate();
    bounds
        .filter_map(|(s, w)| Some((s, usize::try_from(w[0]).ok()?, usize::try_from(w[1]).ok()?)))
        .find(|&(_, start, end)| start <= token && token < end)
        .map(|(sequence, start, end)| Position {
            sequence,
            token: token - start,
            len: end - start,
        })
}

fn token_words(token: usize, position: Option<&Position>, layout: &Layout) -> String {
    match (position, layout.cu_seqlens) {
        (Some(p), _) => format!("sequence {}, token {}", p.sequence, p.token),
        (None, Some(_)) => format!("token {token} of the pack, past the last sequence"),
        (None, None) => format!("token {token} of the pack"),
    }
}

fn block_words(block: usize, size: usize, len: usize) -> String {
    let keys = len.saturating_sub(block * size);
    if keys < size {
        format!("key block {block} (tail, {keys} of {size} keys)")
    } else {
        format!("key block {block}")
    }
}

/// A block of a score row: visible to the query of that row or not.
fn scored_block_words(block: usize, position: Option<&Position>, layout: &Layout) -> String {
    match (position, layout.block_size) {
        (Some(p), Some(size)) if block > p.token / size => {
            format!("key block {block} (not visible)")
        }
        (Some(p), Some(size)) => block_words(block, size, p.len),
        _ => format!("key block {block}"),
    }
}

fn row_words(row: usize, expert_offsets: Option<&[i32]>) -> String {
    let bounds = expert_offsets.unwrap_or_default().windows(2).enumerate();
    let found = bounds
        .filter_map(|(e, w)| Some((e, usize::try_from(w[0]).ok()?, usize::try_from(w[1]).ok()?)))
        .find(|&(_, start, end)| start <= row && row < end);
    match (found, expert_offsets) {
        (Some((e, start, end)), _) => format!("expert {e}, row {} of {}", row - start, end - start),
        (None, Some(_)) => format!("row {row}, past the last expert"),
        (None, None) => format!("row {row}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops;

    fn tensor(op: &str, name: &str) -> &'static TensorArg {
        ops::named(op).unwrap().tensor(name).unwrap()
    }

    const PACK: Layout = Layout {
        cu_seqlens: Some(&[0, 4099, 4099, 8198, 8198]),
        block_size: Some(128),
        expert_offsets: Some(&[0, 3, 3, 10]),
    };

    fn flat(shape: &[usize], coordinates: &[usize]) -> usize {
        shape
            .iter()
            .zip(coordinates)
            .fold(0, |flat, (extent, c)| flat * extent + c)
    }

    fn say(op: &str, name: &str, shape: &[usize], at: &[usize], layout: &Layout) -> String {
        describe(tensor(op, name), shape, flat(shape, at), layout).unwrap()
    }

    #[test]
    fn a_key_gradient_names_sequence_token_head_and_tail_block() {
        let layout = Layout {
            cu_seqlens: Some(&[0, 4099, 8198]),
            ..PACK
        };
        assert_eq!(
            say(
                "msa_attention",
                "dk",
                &[8198, 4, 128],
                &[8196, 2, 77],
                &layout
            ),
            "dk[8196, 2, 77] = sequence 1, token 4097, kv head 2, key block 32 (tail, 3 of 128 keys)"
        );
    }

    #[test]
    fn an_empty_sequence_holds_no_token() {
        assert_eq!(
            say("attention", "o", &[8200, 64, 128], &[4099, 63, 0], &PACK),
            "o[4099, 63, 0] = sequence 2, token 0, q head 63"
        );
        assert_eq!(
            say("attention", "o", &[8200, 64, 128], &[8199, 0, 1], &PACK),
            "o[8199, 0, 1] = token 8199 of the pack, past the last sequence, q head 0"
        );
    }

    #[test]
    fn a_score_says_whether_its_block_is_visible() {
        let shape = [4, 8198, 33];
        assert_eq!(
            say("msa_score", "scores", &shape, &[3, 127, 1], &PACK),
            "scores[3, 127, 1] = sequence 0, token 127, index head 3, key block 1 (not visible)"
        );
        assert_eq!(
            say("msa_score", "scores", &shape, &[3, 4098, 32], &PACK),
            "scores[3, 4098, 32] = sequence 0, token 4098, index head 3, key block 32 (tail, 3 of 128 keys)"
        );
        assert_eq!(
            say("msa_score", "scores", &shape, &[0, 128, 1], &PACK),
            "scores[0, 128, 1] = sequence 0, token 128, index head 0, key block 1"
        );
    }

    #[test]
    fn an_expert_row_names_its_expert() {
        assert_eq!(
            say("grouped_gemm", "y", &[12, 64], &[4, 5], &PACK),
            "y[4, 5] = expert 2, row 1 of 7"
        );
        assert_eq!(
            say("grouped_gemm", "y", &[12, 64], &[11, 5], &PACK),
            "y[11, 5] = row 11, past the last expert"
        );
        assert_eq!(
            say("grouped_gemm", "dw", &[3, 64, 8], &[2, 1, 7], &PACK),
            "dw[2, 1, 7] = expert 2"
        );
    }

    #[test]
    fn without_a_layout_the_pack_index_is_named() {
        assert_eq!(
            say("router", "expert_ids", &[9, 4], &[8, 3], &Layout::default()),
            "expert_ids[8, 3] = token 8 of the pack, expert slot 3"
        );
        assert_eq!(
            say("linear", "dw", &[3, 4], &[2, 1], &Layout::default()),
            "dw[2, 1]"
        );
    }

    #[test]
    fn indices_outside_a_shape_are_not_described() {
        let dk = tensor("attention", "dk");
        assert_eq!(describe(dk, &[2, 1, 4], 8, &PACK), None);
        assert_eq!(describe(dk, &[2, 4], 0, &PACK), None);
        assert_eq!(describe(dk, &[0, 1, 4], 0, &PACK), None);
    }
}
