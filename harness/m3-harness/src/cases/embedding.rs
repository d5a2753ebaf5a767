use m3_kernels::{Backend, Result, ops};
use m3_reference::ops::embedding as reference;

use super::List;
use crate::lab::Lab;

pub(super) fn add<B: Backend>(list: &mut List<B>) {
    list.both("embedding", "t193_v61_h40", |lab| run(lab, 193, 61, 40));
}

fn run<B: Backend>(lab: &mut Lab<'_, B>, tokens: usize, vocab: usize, hidden: usize) -> Result<()> {
    let table = lab.normal("table", 1.0, [vocab, hidden])?;
    let ids = lab.integers("ids", vocab as u32, tokens);
    let device_ids = lab.ints(&ids, [tokens])?;
    let out = lab.output(lab.storage, [tokens, hidden])?;
    let args = ops::Embedding {
        ids: &device_ids,
        table: &table.device,
        out: &out,
    };
    lab.backend.embedding(&lab.stream, &args)?;
    let d_out = lab.normal("d_out", 1.0, [tokens, hidden])?;
    let d_table = lab.gradient([vocab, hidden])?;
    let args = ops::EmbeddingBackward {
        ids: &device_ids,
        d_out: &d_out.device,
        d_table: &d_table,
    };
    lab.backend.embedding_backward(&lab.stream, &args)?;

    let params = reference::Params { vocab, hidden };
    let inputs = reference::Inputs {
        params,
        weight: &table.host,
        ids: &ids,
    };
    let [exact, twin] = [lab.exact(), lab.twin()].map(|rounding| {
        let output = reference::forward(&inputs, &rounding);
        let grads = reference::Grads { dx: &d_out.host };
        (
            reference::backward(&inputs, &output, &grads, &rounding).dweight,
            output.x,
        )
    });
    lab.judge("x", &out, exact.1, twin.1)?;
    lab.judge("dweight", &d_table, exact.0, twin.0)
}
