//! Logits over the target's vocabulary.

use crate::image::Random;
use crate::run::{UNTOUCHED, floats, put, read, run};
use spec_core::testing::cuda::model::params::{Best, NOT_DRAFTED, SpreadParams};
use spec_emu::Arena;
use spec_kernels::Variant;

/// Which of the drafted tokens each token is: every third one, in another order.
fn row_of(vocab: usize, drafted: usize) -> Vec<u32> {
    let mut row_of = vec![NOT_DRAFTED; vocab];
    for row in 0..drafted {
        row_of[3 * row] = ((row * 7 + 2) % drafted) as u32;
    }
    row_of
}

#[test]
fn drafted_tokens_have_their_logits_and_no_others_any() {
    for (seed, (rows, vocab, drafted, grid)) in
        (0..).zip([(1, 64, 5, 1), (3, 1000, 319, 2), (2, 4099, 1361, 7)])
    {
        let (arena, random) = (Arena::new(1 << 26), &mut Random(seed));
        let mut logits: Vec<Vec<f32>> =
            (0..rows).map(|_| random.floats(drafted, |x| 20.0 * x)).collect();
        // Equals: the lowest token wins. What is no number never does.
        let most = logits[0].iter().copied().fold(f32::MIN, f32::max);
        logits[0][0] = most;
        logits[rows - 1][1] = f32::NAN;
        let (row_of, tiles) = (row_of(vocab, drafted), vocab.div_ceil(64));
        let room = |bytes: usize| arena.put(&vec![UNTOUCHED; bytes + 16]);
        let (output, best) = (room(rows * vocab * 4), room(rows * tiles * 8));
        let params = SpreadParams {
            logits: put(&arena, &logits.concat()),
            row_of: arena.put(&row_of.iter().flat_map(|row| row.to_le_bytes()).collect::<Vec<_>>()),
            output,
            best,
            num_rows: rows as u32,
            drafted: drafted as u32,
            vocab: vocab as u32,
            unused: 0,
        };
        run(&Variant::plain("spread"), grid, params, seed);
        let bytes = |address, len| {
            let found = read(&arena, address, len + 16);
            assert!(found[len..].iter().all(|&byte| byte == UNTOUCHED), "written behind");
            found[..len].to_vec()
        };
        let found = floats(&bytes(output, rows * vocab * 4));
        let best = bytes(best, rows * tiles * 8);
        for (row, logits) in logits.iter().enumerate() {
            let expected: Vec<f32> = row_of
                .iter()
                .map(|&from| logits.get(from as usize).copied().unwrap_or(f32::NEG_INFINITY))
                .collect();
            let own = &found[row * vocab..][..vocab];
            assert!(
                own.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()),
                "row {row}"
            );
            for (tile, expected) in expected.chunks(64).enumerate() {
                let mut wins = Best { value: f32::NEG_INFINITY, index: 64 * tile as u32 };
                for (idx, &value) in expected.iter().enumerate() {
                    if value > wins.value {
                        wins = Best { value, index: (64 * tile + idx) as u32 };
                    }
                }
                let at = &best[(row * tiles + tile) * 8..][..8];
                let (value, index) =
                    (floats(&at[..4])[0], u32::from_le_bytes(at[4..].try_into().unwrap()));
                assert_eq!((value, index), (wins.value, wins.index), "row {row}, tile {tile}");
            }
        }
    }
}
