//! Weight sync: whatever the buckets, the engine ends with the trainer's bits, and what was not written shows.

use m3_comm::Solo;
use m3_kernels::cpu::CpuBackend;
use m3_kernels::tensor::as_bytes;
use m3_kernels::{Backend, Tensor};
use m3_model::{Model, Slice};
use m3_rollout::{Engine, WeightSync};
use m3_spec::config::Config;
use m3_spec::dtype::DType;

type Cpu = CpuBackend;

struct Pair {
    backend: Cpu,
    trainer: Model<Cpu, Solo>,
    engine: Engine<Cpu>,
}

impl Pair {
    fn new() -> Self {
        let backend = CpuBackend::default();
        let config = Config::tiny().text;
        let stream = backend.stream();
        let trainer = Model::zeros(&backend, Solo, &config, DType::BF16, true).unwrap();
        let engine = Engine::new(&backend, &stream, &config, DType::BF16, 64).unwrap();
        let pair = Pair {
            backend,
            trainer,
            engine,
        };
        pair.set(0.0);
        pair
    }

    /// Gives every trainer tensor values of its own, moved by `shift`.
    fn set(&self, shift: f32) {
        for (number, slice) in self.trainer.slices().iter().enumerate() {
            let value = |at: usize| ((at * 7 + number * 3) % 61) as f32 / 64.0 - 0.5 + shift;
            let values = (0..slice.value.elements()).map(value);
            let stream = self.backend.stream();
            if slice.value.dtype() == DType::BF16 {
                let values: Vec<half::bf16> = values.map(half::bf16::from_f32).collect();
                self.backend
                    .upload(&stream, &slice.value, as_bytes(&values))
                    .unwrap();
            } else {
                let values: Vec<f32> = values.collect();
                self.backend
                    .upload(&stream, &slice.value, as_bytes(&values))
                    .unwrap();
            }
        }
    }

    fn sync(&self, bucket_bytes: usize) -> WeightSync<Cpu> {
        let slices = (self.trainer.slices(), self.engine.model.slices());
        let sync = WeightSync::new(slices.0, slices.1, bucket_bytes).unwrap();
        sync.fill_pattern(&self.backend, &self.backend.stream(), 9)
            .unwrap();
        sync
    }

    fn different(&self, sync: &WeightSync<Cpu>) -> usize {
        let digests = sync.digests(&self.backend, &self.backend.stream()).unwrap();
        digests
            .values()
            .filter(|[trainer, engine]| trainer != engine)
            .count()
    }
}

#[test]
fn before_the_first_update_no_tensor_agrees() {
    let pair = Pair::new();
    let sync = pair.sync(1 << 20);
    assert_eq!(pair.different(&sync), pair.trainer.slices().len());
}

#[test]
fn every_update_carries_its_own_values_into_the_fused_storage() {
    let mut pair = Pair::new();
    let sync = pair.sync(1 << 20);
    for (version, shift) in [(1, 0.0), (2, 0.25), (3, -0.125)] {
        pair.set(shift);
        let stream = pair.backend.stream();
        let report = sync
            .update(&pair.backend, &stream, &mut pair.engine)
            .unwrap();
        assert_eq!(report.weight_version, version);
        assert!(
            report.different().is_empty(),
            "update {version}: {:?}",
            report.different()
        );
    }
}

#[test]
fn a_bucket_may_end_inside_a_fused_tensor_and_come_twice_or_late() {
    for bucket_bytes in [1, 300, 4096, 100_000] {
        let pair = Pair::new();
        let sync = pair.sync(bucket_bytes);
        let stream = pair.backend.stream();
        let (count, send) = (sync.buckets(), |bucket| {
            sync.send(&pair.backend, &stream, bucket).unwrap()
        });
        (0..count).rev().for_each(send);
        (0..count).step_by(3).for_each(send);
        assert_eq!(pair.different(&sync), 0, "buckets of {bucket_bytes} bytes");
    }
}

#[test]
fn a_bucket_that_never_came_is_seen() {
    let pair = Pair::new();
    let sync = pair.sync(4096);
    let stream = pair.backend.stream();
    for bucket in (0..sync.buckets()).filter(|&bucket| bucket != sync.buckets() / 2) {
        sync.send(&pair.backend, &stream, bucket).unwrap();
    }
    assert!(pair.different(&sync) > 0);
}

#[test]
fn a_tensor_that_one_side_lacks_is_refused_by_name() {
    let pair = Pair::new();
    let all = || (pair.trainer.slices(), pair.engine.model.slices());
    let (source, mut target) = all();
    let lost = target.remove(5).name;
    let refused = WeightSync::new(source, target, 4096)
        .err()
        .unwrap()
        .to_string();
    assert_eq!(refused, format!("weight sync: the engine has no {lost}"));
    let (mut source, target) = all();
    let lost = source.remove(5).name;
    let refused = WeightSync::new(source, target, 4096)
        .err()
        .unwrap()
        .to_string();
    assert!(refused.starts_with(&format!("weight sync: the trainer has no {lost}")));
}

#[test]
fn shared_memory_is_refused_because_it_would_always_agree() {
    let pair = Pair::new();
    let shared: Vec<Slice<Cpu>> = pair.trainer.slices();
    let refused = WeightSync::new(pair.trainer.slices(), shared, 4096)
        .err()
        .unwrap()
        .to_string();
    assert!(refused.contains("share memory"), "{refused}");
}

#[test]
fn every_released_tensor_of_the_model_has_a_slice() {
    let pair = Pair::new();
    let mut slices: Vec<(String, Vec<usize>, bool)> = pair
        .engine
        .model
        .slices()
        .into_iter()
        .map(|slice| (slice.name, slice.value.shape().to_vec(), slice.trained))
        .collect();
    let mut released: Vec<(String, Vec<usize>, bool)> =
        m3_spec::tensors::tensors(&Config::tiny().text)
            .into_iter()
            .map(|tensor| (tensor.name, tensor.shape, tensor.trained))
            .collect();
    slices.sort();
    released.sort();
    assert_eq!(slices, released);
}

#[test]
fn the_row_of_a_fused_part_lies_where_its_name_says() {
    let mut pair = Pair::new();
    let sync = pair.sync(1 << 20);
    let stream = pair.backend.stream();
    sync.update(&pair.backend, &stream, &mut pair.engine)
        .unwrap();
    let layer = &pair.engine.model.layers[1];
    let fused = &layer.attention.qkv.value;
    let read = |tensor: &Tensor<Cpu>| tensor.to_vec::<half::bf16>(&pair.backend, &stream).unwrap();
    let mut start = 0;
    for part in ["q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj"] {
        let name = format!("language_model.model.layers.1.self_attn.{part}.weight");
        let slice = pair
            .trainer
            .slices()
            .into_iter()
            .find(|slice| slice.name == name)
            .unwrap();
        let rows = slice.value.shape()[0];
        assert_eq!(
            read(&fused.slice(0, start..start + rows)),
            read(&slice.value),
            "{part}"
        );
        start += rows;
    }
    assert_eq!(start, fused.shape()[0]);
}
