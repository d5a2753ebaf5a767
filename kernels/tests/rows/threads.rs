//! Several threads that use one backend.

use m3_kernels::{Backend, ops};

use crate::lab::{Lab, host_rows};

/// A worker that waits for its own operation's tasks takes up other work; were that another operation on a buffer the
/// first one holds, it would wait for itself.
#[test]
fn operations_of_several_threads_on_one_weight_all_finish() {
    let lab = Lab::plain();
    let (rows, width) = (130, 512);
    let x = lab.put(&host_rows(1, &(0..rows), width), [rows, width]);
    let weight = lab.put(&host_rows(2, &(0..width), width), [width, width]);
    let product = || {
        let y = lab.f32s([rows, width]);
        let args = ops::Gemm {
            a: &x,
            b: &weight,
            c: &y,
            accumulate: false,
        };
        for _ in 0..400 {
            lab.backend.gemm(&lab.stream, &args).unwrap();
        }
        lab.bits(&y)
    };
    let [first, second, third] = std::thread::scope(|scope| {
        [(); 3]
            .map(|()| scope.spawn(product))
            .map(|thread| thread.join().unwrap())
    });
    assert!(first == second && second == third);
}
