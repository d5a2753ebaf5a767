//! Attention, dense and block-sparse, held against a plain f64 model and against itself: a row's bits follow from its
//! own query, the keys it sees and nothing else.

mod exact;
mod lab;
mod model;
mod rows;
mod selection;
