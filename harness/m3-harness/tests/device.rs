//! What a GPU must keep besides the gates: launches of nothing, threads, memory, faults, and bits that depend on a row
//! alone. Ignored where there is no GPU.

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use libtest_mimic::{Arguments, Failed, Trial};
use m3_kernels::cuda::{CudaBackend, CudaStream};
use m3_kernels::tensor::Element;
use m3_kernels::{Backend, Error, Result, Tensor, ops};
use m3_spec::dtype::DType;
use m3_spec::inputs::{Distribution, Inputs};

type View = Tensor<CudaBackend>;
type Check = fn(&Bench) -> Result<()>;

/// A GPU and a queue.
struct Bench {
    backend: CudaBackend,
    stream: CudaStream,
}

/// Every check, by the words of what holds.
const CHECKS: &[(&str, Check)] = &[
    ("a_launch_over_nothing_is_no_launch", nothing),
    ("a_handle_works_on_another_thread", threads),
    ("memory_has_a_limit_and_is_used_again", memory),
    (
        "an_index_that_points_nowhere_is_named_at_the_next_wait",
        fault,
    ),
    ("strided_views_travel_both_ways", transfers),
    ("a_slice_of_a_weight_is_read_where_it_lies", slice),
    ("rows_of_a_product_keep_their_bits_alone", product_rows),
    ("rows_of_an_expert_keep_their_bits_alone", expert_rows),
    ("log_probs_of_a_row_keep_their_bits_alone", log_prob_rows),
    ("norms_of_a_row_keep_their_bits_alone", norm_rows),
    ("gradients_repeat_bit_for_bit", repeats),
];

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let absent = CudaBackend::probe(0).err();
    if let Some(reason) = absent.as_ref().filter(|_| !arguments.list) {
        eprintln!("cuda:: checks are ignored: {reason}");
    }
    let opened: Arc<OnceLock<Result<CudaBackend>>> = Arc::default();
    let trials = CHECKS.iter().map(|&(name, check)| {
        let opened = opened.clone();
        let run = move || -> std::result::Result<(), Failed> {
            let backend = opened.get_or_init(|| CudaBackend::open(0)).clone();
            let backend = backend.map_err(|error| error.to_string())?;
            let stream = backend.stream();
            check(&Bench { backend, stream }).map_err(|error| error.to_string().into())
        };
        Trial::test(format!("cuda::{name}"), run).with_ignored_flag(absent.is_some())
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

impl Bench {
    fn normal(&self, label: &str, dtype: DType, shape: [usize; 2]) -> Result<View> {
        let drawn = Distribution::Normal { std: 1.0 };
        let values = Inputs::new(7, "device").f64s(label, drawn, dtype, shape[0] * shape[1]);
        if dtype == DType::BF16 {
            let values: Vec<_> = values.into_iter().map(half::bf16::from_f64).collect();
            return self.tensor(&values, shape);
        }
        let values: Vec<_> = values.into_iter().map(|x| x as f32).collect();
        self.tensor(&values, shape)
    }

    fn tensor<E: Element, const N: usize>(&self, values: &[E], shape: [usize; N]) -> Result<View> {
        Tensor::from_slice(&self.backend, &self.stream, values, shape)
    }

    fn zeros<const N: usize>(&self, dtype: DType, shape: [usize; N]) -> Result<View> {
        Tensor::zeros(&self.backend, dtype, shape)
    }

    fn bytes(&self, tensor: &View) -> Result<Vec<u8>> {
        let mut bytes = vec![0; tensor.elements() * tensor.dtype().size()];
        self.backend.download(&self.stream, tensor, &mut bytes)?;
        Ok(bytes)
    }

    /// `c = a · b` in the storage of `a`.
    fn product(&self, a: &View, b: &View) -> Result<View> {
        let c = self.zeros(a.dtype(), [a.shape()[0], b.shape()[1]])?;
        let args = ops::Gemm {
            a,
            b,
            c: &c,
            accumulate: false,
        };
        self.backend.gemm(&self.stream, &args)?;
        Ok(c)
    }

    fn experts(&self, a: &View, b: &View, offsets: &[i32]) -> Result<View> {
        let c = self.zeros(a.dtype(), [a.shape()[0], b.shape()[2]])?;
        let args = ops::GroupedGemm {
            a,
            b,
            expert_offsets: &self.tensor(offsets, [offsets.len()])?,
            c: &c,
        };
        self.backend.grouped_gemm(&self.stream, &args)?;
        Ok(c)
    }

    /// log-prob, lse and entropy.
    fn log_probs(&self, x: &View, weight: &View, targets: &[i32]) -> Result<[View; 3]> {
        let tokens = targets.len();
        let outputs = [(); 3].map(|()| self.zeros(DType::F32, [tokens]));
        let [log_prob, lse, entropy] = outputs;
        let (log_prob, lse, entropy) = (log_prob?, lse?, entropy?);
        let args = ops::LogProb {
            x,
            weight,
            targets: &self.tensor(targets, [tokens])?,
            temperature: &self.tensor(&[0.7f32], [1])?,
            log_prob: &log_prob,
            lse: &lse,
            entropy: &entropy,
        };
        self.backend.log_prob(&self.stream, &args)?;
        Ok([log_prob, lse, entropy])
    }

    fn norm(&self, x: &View) -> Result<View> {
        let out = self.zeros(x.dtype(), [x.shape()[0], x.shape()[1]])?;
        let args = ops::RmsNorm {
            residual: x,
            y: None,
            weight: &self
                .normal("norm", x.dtype(), [1, x.shape()[1]])?
                .reshape([x.shape()[1]]),
            residual_out: None,
            out: &out,
            rstd: &self.zeros(DType::F32, [x.shape()[0]])?,
            eps: 1e-6,
        };
        self.backend.rms_norm(&self.stream, &args)?;
        Ok(out)
    }

    fn same(&self, a: &View, b: &View) -> Result<()> {
        assert!(
            self.bytes(a)? == self.bytes(b)?,
            "bits differ: {a:?} against {b:?}"
        );
        Ok(())
    }
}

fn nothing(bench: &Bench) -> Result<()> {
    let (empty, head) = (
        bench.zeros(DType::BF16, [0, 64])?,
        bench.zeros(DType::BF16, [64, 8])?,
    );
    bench.product(&empty, &head)?;
    bench.experts(
        &empty,
        &bench.zeros(DType::BF16, [3, 64, 8])?,
        &[0, 0, 0, 0],
    )?;
    bench.norm(&empty)?;
    let healthy = bench.tensor(&[42i32], [1])?;
    assert_eq!(healthy.to_vec::<i32>(&bench.backend, &bench.stream)?, [42]);
    Ok(())
}

fn threads(bench: &Bench) -> Result<()> {
    let backend = bench.backend.clone();
    let elsewhere = std::thread::spawn(move || -> Result<Vec<i32>> {
        let stream = backend.stream();
        let held = Tensor::<CudaBackend>::from_slice(&backend, &stream, &[5, 6], [2])?;
        held.to_vec(&backend, &stream)
    });
    assert_eq!(elsewhere.join().expect("the thread ends")?, [5, 6]);
    Ok(())
}

fn memory(_: &Bench) -> Result<()> {
    let backend = CudaBackend::open_with_limit(0, 1 << 20)?;
    let first = backend.alloc(600 << 10)?;
    let address = CudaBackend::buffer_id(&first);
    let refused = backend.alloc(600 << 10).err();
    assert!(matches!(refused, Some(Error::OutOfMemory { bytes, .. }) if bytes == 600 << 10));
    drop(first);
    let again = backend.alloc(600 << 10)?;
    assert_eq!(CudaBackend::buffer_id(&again), address);
    let report = backend.memory();
    assert_eq!((report.used_bytes, report.cached_bytes), (600 << 10, 0));
    assert_eq!(
        (report.peak_bytes, report.limit_bytes),
        (600 << 10, 1 << 20)
    );
    // Another size makes room by giving the cached block up.
    drop(again);
    backend.alloc(900 << 10).map(|_| ())
}

fn fault(bench: &Bench) -> Result<()> {
    let table = bench.normal("table", DType::F32, [11, 16])?;
    let out = bench.zeros(DType::F32, [3, 16])?;
    let embed = |ids: [i32; 3]| -> Result<()> {
        let ids = bench.tensor(&ids, [3])?;
        let args = ops::Embedding {
            ids: &ids,
            table: &table,
            out: &out,
        };
        bench.backend.embedding(&bench.stream, &args)
    };
    embed([3, 11, 0])?;
    let found = bench.backend.sync(&bench.stream).unwrap_err();
    assert_eq!(found.to_string(), "embedding: ids[1] = 11 is outside 0..11");
    embed([3, 10, 0])?;
    bench.backend.sync(&bench.stream)
}

fn transfers(bench: &Bench) -> Result<()> {
    let whole: Vec<i32> = (0..6 * 20).collect();
    let tensor = bench.tensor(&whole, [6, 20])?;
    let view = tensor.slice(1, 3..14).transpose(0, 1);
    let expected: Vec<i32> = (3..14)
        .flat_map(|c| (0..6).map(move |r| 20 * r + c))
        .collect();
    assert_eq!(view.to_vec::<i32>(&bench.backend, &bench.stream)?, expected);
    let target = bench.zeros(DType::I32, [6, 20])?;
    let bytes = m3_kernels::tensor::as_bytes(&expected);
    let inner = target.slice(1, 3..14).transpose(0, 1);
    bench.backend.upload(&bench.stream, &inner, bytes)?;
    let placed = target.to_vec::<i32>(&bench.backend, &bench.stream)?;
    for (i, &x) in placed.iter().enumerate() {
        let inside = (3..14).contains(&(i % 20));
        assert_eq!(x, if inside { whole[i] } else { 0 });
    }
    Ok(())
}

/// A packed copy that reads its weight at the old offset answers [32, 54].
fn slice(bench: &Bench) -> Result<()> {
    let buffer: Vec<f32> = (0..12u8).map(f32::from).collect();
    let weight = bench.tensor(&buffer, [2, 6])?.slice(1, 2..4);
    let x = bench.tensor(&[1.0f32, 10.0], [1, 2])?;
    let y = bench.product(&x, &weight.transpose(0, 1))?;
    assert_eq!(
        y.to_vec::<f32>(&bench.backend, &bench.stream)?,
        [32.0, 98.0]
    );
    Ok(())
}

fn product_rows(bench: &Bench) -> Result<()> {
    for dtype in [DType::BF16, DType::F32] {
        let x = bench.normal("x", dtype, [300, 200])?;
        let w = bench.normal("w", dtype, [264, 200])?.transpose(0, 1);
        let all = bench.product(&x, &w)?;
        for rows in [0..1, 17..18, 100..229, 299..300] {
            let alone = bench.product(&x.slice(0, rows.clone()), &w)?;
            bench.same(&alone, &all.slice(0, rows))?;
        }
        let columns = bench.product(&x, &w.slice(1, 40..200))?;
        bench.same(&columns, &all.slice(1, 40..200))?;
    }
    Ok(())
}

fn expert_rows(bench: &Bench) -> Result<()> {
    for dtype in [DType::BF16, DType::F32] {
        let x = bench.normal("x", dtype, [500, 96])?;
        let w = bench
            .normal("w", dtype, [4 * 72, 96])?
            .reshape([4, 72, 96])
            .transpose(1, 2);
        let all = bench.experts(&x, &w, &[0, 7, 7, 290, 480])?;
        for (rows, expert) in [(0..7, 0), (7..290, 2), (290..480, 3)] {
            let matrix = w.slice(0, expert..expert + 1);
            let alone =
                bench.experts(&x.slice(0, rows.clone()), &matrix, &[0, rows.len() as i32])?;
            bench.same(&alone, &all.slice(0, rows))?;
        }
        assert!(
            bench
                .bytes(&all.slice(0, 480..500))?
                .iter()
                .all(|&byte| byte == 0)
        );
    }
    Ok(())
}

fn log_prob_rows(bench: &Bench) -> Result<()> {
    let (tokens, vocab) = (40, 9000);
    for dtype in [DType::BF16, DType::F32] {
        let x = bench.normal("x", dtype, [tokens, 64])?;
        let w = bench.normal("w", dtype, [vocab, 64])?;
        let targets: Vec<i32> = (0..tokens as i32)
            .map(|t| (t * 997) % vocab as i32)
            .collect();
        let all = bench.log_probs(&x, &w, &targets)?;
        for t in [0, 13, tokens - 1] {
            let alone = bench.log_probs(&x.slice(0, t..t + 1), &w, &targets[t..t + 1])?;
            for (alone, all) in alone.iter().zip(&all) {
                bench.same(alone, &all.slice(0, t..t + 1))?;
            }
        }
    }
    Ok(())
}

fn norm_rows(bench: &Bench) -> Result<()> {
    for width in [24, 203, 2056, 6144] {
        // A slice whose rows are not aligned to vectors has the bits of an aligned one.
        let x = bench.normal("x", DType::BF16, [9, width])?;
        let wide = bench.zeros(DType::BF16, [9, width + 3])?;
        let inner = wide.slice(1, 1..width + 1);
        let copy = ops::Copy {
            source: &x,
            target: &inner,
        };
        bench.backend.copy(&bench.stream, &copy)?;
        let all = bench.norm(&x)?;
        bench.same(&bench.norm(&inner)?, &all)?;
        bench.same(&bench.norm(&x.slice(0, 5..6))?, &all.slice(0, 5..6))?;
    }
    Ok(())
}

fn repeats(bench: &Bench) -> Result<()> {
    let (rows, experts) = (1500, 5);
    let dy = bench.normal("dy", DType::BF16, [rows, 136])?;
    let x = bench.normal("x", DType::BF16, [rows, 200])?;
    let offsets = bench.tensor(&[0, 400, 401, 401, 1100, 1500], [experts + 1])?;
    let run = || -> Result<Vec<u8>> {
        let dw = bench.zeros(DType::F32, [experts, 136, 200])?;
        let args = ops::GroupedGemmWeights {
            a: &dy,
            b: &x,
            expert_offsets: &offsets,
            dw: &dw,
        };
        bench.backend.grouped_gemm_weights(&bench.stream, &args)?;
        let sum = bench.zeros(DType::F32, [1])?;
        let squares = ops::SumSquares {
            source: &dw,
            sum: &sum,
        };
        bench.backend.sum_squares(&bench.stream, &squares)?;
        Ok([bench.bytes(&dw)?, bench.bytes(&sum)?].concat())
    };
    let first = run()?;
    for _ in 0..20 {
        assert!(run()? == first, "bits differ between repeats");
    }
    Ok(())
}
