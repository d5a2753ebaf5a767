use m3_kernels::{Backend, Result, Tensor, ops};
use m3_reference::Precision;
use m3_reference::ops::linear as reference;
use m3_spec::dtype::DType;

use super::List;
use crate::lab::Lab;

/// Rows, output channels and input channels of a case, and whether the weight is a slice of a wider one.
#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    n: usize,
    k: usize,
    fused: bool,
}

pub(super) fn add<B: Backend>(list: &mut List<B>) {
    for (variant, rows, n, k, fused) in [
        ("m97_n136_k72", 97, 136, 72, false),
        ("m33_n200_k1100", 33, 200, 1100, false),
        ("fused_m64_n96_k128", 64, 96, 128, true),
    ] {
        list.both("linear", variant, move |lab| {
            run(lab, Shape { rows, n, k, fused })
        });
    }
    // One row has too few elements for a ratio to the twin, so bf16 has no such case.
    let one_row = Shape {
        rows: 1,
        n: 4100,
        k: 256,
        fused: false,
    };
    list.one("linear", "m1_n4100_k256", DType::F32, move |lab| {
        run(lab, one_row)
    });
}

fn run<B: Backend>(lab: &mut Lab<'_, B>, shape: Shape) -> Result<()> {
    let Shape { rows, n, k, fused } = shape;
    let x = lab.normal("x", 1.0, [rows, k])?;
    let w = lab.normal("w", (k as f64).powf(-0.5), [n, k])?;
    let dy = lab.normal("dy", 1.0, [rows, n])?;
    let weight = if fused {
        inside_wider(lab, &w.device)?
    } else {
        w.device.clone()
    };
    let y = lab.output(lab.storage, [rows, n])?;
    let dx = lab.output(lab.storage, [rows, k])?;
    let dw = lab.gradient([n, k])?;
    let product = |a: &Tensor<B>, b: &Tensor<B>, c: &Tensor<B>, accumulate| {
        lab.backend.gemm(
            &lab.stream,
            &ops::Gemm {
                a,
                b,
                c,
                accumulate,
            },
        )
    };
    product(&x.device, &weight.transpose(0, 1), &y, false)?;
    product(&dy.device, &weight, &dx, false)?;
    product(&dy.device.transpose(0, 1), &x.device, &dw, true)?;

    let params = reference::Params {
        rows,
        n,
        k,
        y: Precision::Storage,
        dx: Precision::Storage,
    };
    let inputs = reference::Inputs {
        params,
        x: &x.host,
        w: &w.host,
    };
    let [exact, twin] = [lab.exact(), lab.twin()].map(|rounding| {
        let output = reference::forward(&inputs, &rounding);
        let grads = reference::Grads { dy: &dy.host };
        (
            reference::backward(&inputs, &output, &grads, &rounding),
            output.y,
        )
    });
    lab.judge("y", &y, exact.1, twin.1)?;
    lab.judge("dx", &dx, exact.0.dx, twin.0.dx)?;
    lab.judge("dw", &dw, exact.0.dw, twin.0.dw)
}

/// The weight as middle rows and columns of a larger, poisoned one.
fn inside_wider<B: Backend>(lab: &Lab<'_, B>, weight: &Tensor<B>) -> Result<Tensor<B>> {
    let (n, k) = (weight.shape()[0], weight.shape()[1]);
    let wide = lab.output(weight.dtype(), [n + 7, k + 9])?;
    let inside = wide.slice(0, 3..3 + n).slice(1, 5..5 + k);
    lab.backend.copy(
        &lab.stream,
        &ops::Copy {
            source: weight,
            target: &inside,
        },
    )?;
    Ok(inside)
}
