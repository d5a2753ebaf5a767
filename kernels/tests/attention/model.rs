//! Attention of one document in f64, key by key.

use crate::lab::{Document, Heads, Rule};

pub struct Exact {
    pub o: Vec<f64>,
    pub lse: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

pub fn attention(document: &Document, heads: Heads, rule: Rule) -> Exact {
    let dim = heads.dim;
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let (q, k, v) = (wide(&document.q), wide(&document.k), wide(&document.v));
    let d_o = wide(&document.d_o);
    let mut exact = Exact {
        o: vec![0.0; q.len()],
        lse: vec![f64::NEG_INFINITY; document.length * heads.q],
        dq: vec![0.0; q.len()],
        dk: vec![0.0; k.len()],
        dv: vec![0.0; v.len()],
    };
    let scale = f64::from(heads.scale());
    for i in 0..document.length * heads.q {
        let (token, kv_head) = (i / heads.q, i % heads.q / heads.group());
        let keys: Vec<usize> = (0..document.length)
            .filter(|&key| document.sees(heads, rule, kv_head, token, key))
            .map(|key| (key * heads.kv + kv_head) * dim)
            .collect();
        if keys.is_empty() {
            continue;
        }
        let row = i * dim..(i + 1) * dim;
        let (q, d_o) = (&q[row.clone()], &d_o[row.clone()]);
        let scores: Vec<f64> = keys
            .iter()
            .map(|&j| scale * dot(q, &k[j..j + dim]))
            .collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
        exact.lse[i] = largest + sum.ln();
        let p: Vec<f64> = scores.iter().map(|s| (s - exact.lse[i]).exp()).collect();
        for (&j, &p) in keys.iter().zip(&p) {
            add(p, &v[j..j + dim], &mut exact.o[row.clone()]);
            add(p, d_o, &mut exact.dv[j..j + dim]);
        }
        let delta = dot(d_o, &exact.o[row.clone()]);
        for (&j, &p) in keys.iter().zip(&p) {
            let d_s = scale * p * (dot(d_o, &v[j..j + dim]) - delta);
            add(d_s, &k[j..j + dim], &mut exact.dq[row.clone()]);
            add(d_s, q, &mut exact.dk[j..j + dim]);
        }
    }
    exact
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

fn add(factor: f64, x: &[f64], sum: &mut [f64]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += factor * x;
    }
}

/// Root mean square below which an error counts as if against this: gradients of queries that see few keys nearly vanish,
/// while dP − delta keeps the fp32 error of its two sums over the channels, about 1e-7.
const FLOOR: f64 = 1e-2;

/// rms(got − exact) / rms(exact), NaN if anything is.
pub fn distance(got: &[f32], exact: &[f64]) -> f64 {
    assert_eq!(got.len(), exact.len());
    let rms = |x: &mut dyn Iterator<Item = f64>| {
        (x.map(|x| x * x).sum::<f64>() / exact.len().max(1) as f64).sqrt()
    };
    let pairs = got.iter().zip(exact);
    let error = rms(&mut pairs.map(|(&got, &exact)| f64::from(got) - exact));
    error / rms(&mut exact.iter().copied()).max(FLOOR)
}
