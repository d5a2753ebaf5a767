//! Philox4x32-10, the counter-based generator behind everything random.
//!
//! Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A word depends on the run's
//! seed, the stream and a counter alone, so it never matters who draws first, or on how many threads.

/// What a stream of random words is for; one run seed drives them all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// Token sampling during rollout.
    Sampler = 0,
    /// Initial parameters.
    Init = 1,
    /// Order and content of generated data.
    Data = 2,
    /// The pattern that fills engine tensors before the first weight update.
    Fill = 3,
    /// Inputs of test cases.
    CaseInputs = 4,
}

/// Increment of the splitmix64 sequence, 2^64 divided by the golden ratio, made odd.
const SPLITMIX_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Output number `n` (from 0) of the splitmix64 generator that starts at `seed`.
///
/// Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
#[inline]
pub const fn splitmix64(seed: u64, n: u64) -> u64 {
    let mut z = seed.wrapping_add(n.wrapping_add(1).wrapping_mul(SPLITMIX_GAMMA));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const KEY_STEPS: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;

/// Four random words of a counter under a key.
#[inline]
pub const fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let mut c = counter;
    let mut k = key;
    let mut round = 0;
    while round < ROUNDS {
        let p0 = MULTIPLIERS[0] as u64 * c[0] as u64;
        let p1 = MULTIPLIERS[1] as u64 * c[2] as u64;
        c = [
            (p1 >> 32) as u32 ^ c[1] ^ k[0],
            p1 as u32,
            (p0 >> 32) as u32 ^ c[3] ^ k[1],
            p0 as u32,
        ];
        k = [
            k[0].wrapping_add(KEY_STEPS[0]),
            k[1].wrapping_add(KEY_STEPS[1]),
        ];
        round += 1;
    }
    c
}

/// The generator of one stream of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Philox {
    /// Low and high word of `splitmix64(run_seed, stream)`.
    pub key: [u32; 2],
}

impl Philox {
    /// The generator of `stream` in the run of `run_seed`.
    pub const fn new(run_seed: u64, stream: Stream) -> Self {
        let key = splitmix64(run_seed, stream as u64);
        Philox {
            key: [key as u32, (key >> 32) as u32],
        }
    }

    /// The four words of a counter.
    #[inline]
    pub const fn block(&self, counter: [u32; 4]) -> [u32; 4] {
        philox4x32_10(counter, self.key)
    }

    /// The sampler's word of one vocabulary entry: counter (running number of the prompt in the run, sample, position,
    /// vocab id / 4), lane vocab id % 4. It does not depend on who shares the batch.
    #[inline]
    pub const fn sampler_word(
        &self,
        prompt: u32,
        sample: u32,
        position: u32,
        vocab_id: u32,
    ) -> u32 {
        self.block([prompt, sample, position, vocab_id / 4])[(vocab_id % 4) as usize]
    }
}

/// A word as a number strictly between 0 and 1: (w + ½)·2^-32, exact in f64.
#[inline]
pub fn unit_open(word: u32) -> f64 {
    (f64::from(word) + 0.5) * (1.0 / 4_294_967_296.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the Random123 distribution (kat_vectors, philox4x32 10).
    #[test]
    fn known_answers_hold() {
        let cases = [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox4x32_10(counter, key), expected);
        }
    }

    /// The first outputs of splitmix64 from seed 1234567, as published with its reference code.
    #[test]
    fn splitmix64_known_answers_hold() {
        let expected = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
        ];
        for (n, expected) in expected.into_iter().enumerate() {
            assert_eq!(splitmix64(1_234_567, n as u64), expected);
        }
    }

    #[test]
    fn streams_of_a_seed_have_the_numbers_and_keys_written_down() {
        let streams = [
            Stream::Sampler,
            Stream::Init,
            Stream::Data,
            Stream::Fill,
            Stream::CaseInputs,
        ];
        let keys: Vec<_> = streams.iter().map(|&s| Philox::new(0, s).key).collect();
        // splitmix64 from seed 0: 0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4, 0x06c45d188009454f, 0xf88bb8a8724c81ec, 0x1b39896a51a8749b
        assert_eq!(
            keys,
            [
                [0x7b1d_cdaf, 0xe220_a839],
                [0xa1b9_65f4, 0x6e78_9e6a],
                [0x8009_454f, 0x06c4_5d18],
                [0x724c_81ec, 0xf88b_b8a8],
                [0x51a8_749b, 0x1b39_896a],
            ]
        );
    }

    #[test]
    fn sampler_words_are_lanes_of_one_block() {
        let philox = Philox::new(7, Stream::Sampler);
        let block = philox.block([3, 1, 9, 50_006]);
        for lane in 0..4 {
            assert_eq!(
                philox.sampler_word(3, 1, 9, 200_024 + lane),
                block[lane as usize]
            );
        }
    }

    /// Vector for other implementations: seed 42, prompt 5, sample 3, position 17, the last four ids of M3.
    #[test]
    fn sampler_vector_holds() {
        let philox = Philox::new(42, Stream::Sampler);
        let words =
            [200_060, 200_061, 200_062, 200_063].map(|id| philox.sampler_word(5, 3, 17, id));
        assert_eq!(words, [0x6f2d_a2ad, 0x5d72_2edc, 0xc279_4c11, 0x1b43_a1ab]);
    }

    #[test]
    fn unit_open_never_reaches_its_ends() {
        assert!(unit_open(0) > 0.0 && unit_open(u32::MAX) < 1.0);
    }
}
