//! Predicts steps from two limits, memory and arithmetic, and what speculation makes of them. Pure.

/// What passes of a model take.
pub trait Passes {
    /// Milliseconds of a pass of `rows` rows; at least one.
    fn ms(&self, rows: usize) -> f64;
}

/// Passes of some numbers of rows whose times are known; others lie between them.
#[derive(Clone, Debug)]
pub struct Points {
    /// Rows, rising, and milliseconds.
    pub points: Vec<(usize, f64)>,
}

impl Passes for Points {
    fn ms(&self, rows: usize) -> f64 {
        let above = self.points.partition_point(|&(at, _)| at < rows);
        match (above.checked_sub(1).map(|below| self.points[below]), self.points.get(above)) {
            (Some((from, from_ms)), Some(&(to, to_ms))) => {
                let share = (rows - from) as f64 / (to - from) as f64;
                from_ms + share * (to_ms - from_ms)
            }
            (None, Some(&(_, ms))) => ms,
            // Beyond the last each row takes as long as the rows before it did.
            (Some((last, ms)), None) => ms * rows as f64 / last as f64,
            (None, None) => f64::NAN,
        }
    }
}

/// Matrix products of a pass: multiply-adds of one row, and how many a second the machine does.
#[derive(Clone, Debug)]
pub struct Product {
    /// Multiply-adds of a row.
    pub macs: f64,
    /// `rates[n]`: multiply-adds a second with `n + 1` rows; the last holds for more.
    pub rates: Vec<f64>,
}

/// What limits the passes of one model.
#[derive(Clone, Debug)]
pub struct Roofline {
    /// Bytes of weights that a pass reads.
    pub bytes: f64,
    /// Bytes a second.
    pub bandwidth: f64,
    /// Its products, one after the other.
    pub products: Vec<Product>,
}

impl Passes for Roofline {
    /// The longer of reading the weights and multiplying.
    fn ms(&self, rows: usize) -> f64 {
        let multiply = |product: &Product| {
            let rate = product.rates[(rows - 1).min(product.rates.len() - 1)];
            rows as f64 * product.macs / rate
        };
        let multiplying: f64 = self.products.iter().map(multiply).sum();
        1e3 * multiplying.max(self.bytes / self.bandwidth)
    }
}

/// Passes of a part of a model.
pub struct Share<'a> {
    /// Those of the whole.
    pub whole: &'a dyn Passes,
    /// What they take of those.
    pub share: f64,
}

impl Passes for Share<'_> {
    fn ms(&self, rows: usize) -> f64 {
        self.share * self.whole.ms(rows)
    }
}

/// A predicted step of one sequence that drafts `draft_len` tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Draft tokens.
    pub draft_len: usize,
    /// The target's pass over them and one more row.
    pub verify_ms: f64,
    /// The drafter's passes, one a token, or all tokens in one.
    pub draft_ms: f64,
}

impl Step {
    /// The step of a target with a drafter that is a model, or with one that costs nothing.
    pub fn new(
        draft_len: usize,
        target: &dyn Passes,
        draft: Option<&dyn Passes>,
        at_once: bool,
    ) -> Self {
        let draft_ms = |draft: &dyn Passes| match at_once {
            true if draft_len > 0 => draft.ms(draft_len),
            _ => draft_len as f64 * draft.ms(1),
        };
        Self {
            draft_len,
            verify_ms: target.ms(draft_len + 1),
            draft_ms: draft.map_or(0.0, draft_ms),
        }
    }

    /// All of it.
    pub fn ms(&self) -> f64 {
        self.verify_ms + self.draft_ms
    }

    /// Tokens a second when each draft token is accepted with this probability.
    pub fn rate(&self, acceptance: f64) -> f64 {
        1e3 * expected_tokens(acceptance, self.draft_len) / self.ms()
    }

    /// The acceptance from which on the step is no slower than plain ones of `plain_ms`; none if it is
    /// slower even when everything is accepted.
    pub fn break_even(&self, plain_ms: f64) -> Option<f64> {
        let needed = self.ms() / plain_ms;
        if needed > (self.draft_len + 1) as f64 {
            return None;
        }
        // The expected tokens rise with the acceptance: halve the interval to the last bit that matters.
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..50 {
            let middle = 0.5 * (low + high);
            match expected_tokens(middle, self.draft_len) < needed {
                true => low = middle,
                false => high = middle,
            }
        }
        Some(high)
    }
}

/// Tokens of a step: the accepted drafts up to the first refusal, and one of the target's own.
fn expected_tokens(acceptance: f64, draft_len: usize) -> f64 {
    (0..=draft_len).map(|accepted| acceptance.powi(accepted as i32)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1000 bytes at 1e6 bytes a second: 1 ms. 100 multiply-adds a row at 1e5 a second: 1 ms a row, and
    /// at twice the rate from two rows on.
    fn target() -> Roofline {
        let products = vec![Product { macs: 100.0, rates: vec![1e5, 2e5] }];
        Roofline { bytes: 1000.0, bandwidth: 1e6, products }
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn a_pass_takes_the_longer_of_reading_and_multiplying() {
        let times: Vec<f64> = (1..=5).map(|rows| target().ms(rows)).collect();
        // 1, 1, 1.5, 2 and 2.5 ms of multiplying; reading takes 1 ms.
        for (time, expected) in times.into_iter().zip([1.0, 1.0, 1.5, 2.0, 2.5]) {
            assert!(close(time, expected), "{time} is not {expected}");
        }
    }

    #[test]
    fn between_known_rows_lie_the_others() {
        let points = Points { points: vec![(1, 2.0), (3, 3.0), (4, 5.0)] };
        for (rows, expected) in [(1, 2.0), (2, 2.5), (3, 3.0), (4, 5.0), (8, 10.0)] {
            assert!(close(points.ms(rows), expected), "{rows} rows: {}", points.ms(rows));
        }
    }

    #[test]
    fn products_of_several_formats_add_up() {
        let head = Product { macs: 50.0, rates: vec![1e4] };
        let both = Roofline { products: [target().products, vec![head]].concat(), ..target() };
        assert!(close(both.ms(1), 1.0 + 5.0));
        assert!(close(both.ms(4), 2.0 + 20.0));
    }

    #[test]
    fn expected_tokens_are_the_geometric_sum() {
        assert!(close(expected_tokens(0.5, 0), 1.0));
        assert!(close(expected_tokens(0.5, 3), 1.0 + 0.5 + 0.25 + 0.125));
        assert!(close(expected_tokens(1.0, 4), 5.0));
        assert!(close(expected_tokens(0.0, 4), 1.0));
    }

    #[test]
    fn a_drafter_is_run_once_a_token_or_once() {
        let products = vec![Product { macs: 1.0, rates: vec![1e9] }];
        let draft = Roofline { bytes: 100.0, products, ..target() };
        let at_once = Step::new(3, &target(), Some(&draft), true);
        assert!(close(at_once.verify_ms, 2.0) && close(at_once.draft_ms, 0.1));
        let step = Step::new(3, &target(), Some(&draft), false);
        assert!(close(step.verify_ms, 2.0) && close(step.draft_ms, 0.3) && close(step.ms(), 2.3));
        // 1 + 0.5 + 0.25 + 0.125 tokens in 2.3 ms.
        assert!(close(step.rate(0.5), 1875.0 / 2.3));
    }

    #[test]
    fn break_even_is_where_the_step_pays_for_itself() {
        // One draft token: 1 + a = 1.2.
        let step = Step { draft_len: 1, verify_ms: 1.0, draft_ms: 0.2 };
        assert!(close(step.break_even(1.0).unwrap(), 0.2));
        assert!(close(step.rate(0.2), 1000.0));
        // Two: 1 + a + a^2 = 1.75 at a = 0.5.
        let step = Step { draft_len: 2, verify_ms: 1.5, draft_ms: 0.25 };
        assert!(close(step.break_even(1.0).unwrap(), 0.5));
        // Drafts that cost nothing pay at once, and a step of more than K + 1 plain ones never.
        let free = Step { draft_len: 4, verify_ms: 1.0, draft_ms: 0.0 };
        assert!(free.break_even(1.0).unwrap() < 1e-9);
        let dear = Step { draft_len: 1, verify_ms: 1.0, draft_ms: 1.01 };
        assert_eq!(dear.break_even(1.0), None);
    }
}
