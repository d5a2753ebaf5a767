//! CPU benches: `cargo bench -p m3-bench`. The crate holds nothing else, and stands outside the default members so that
//! tests do not compile what only benches need.
