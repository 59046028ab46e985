//! Sends requests as a load says, and waits for all answers.

use crate::answer::{Answer, Ask};
use crate::endpoint::Endpoint;
use crate::setting::Load;
use futures_util::stream::{self, StreamExt};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Sends `asks` in order and gives the answers in that order; `tell` is called as each one ends.
pub(crate) async fn drive(
    endpoint: &Endpoint,
    load: Load,
    asks: Vec<Ask>,
    tell: impl Fn(&Answer),
) -> Vec<Answer> {
    let count = asks.len();
    let (at_once, times) = match load {
        Load::Concurrency(at_once) => (at_once, vec![Duration::ZERO; count]),
        Load::Rate(rate) => (count, arrivals(rate, count)),
    };
    let start = Instant::now();
    let ask = |(idx, (ask, at))| async move {
        sleep_until(start + at).await;
        (idx, endpoint.ask(ask).await)
    };
    let sent = asks.into_iter().zip(times).enumerate().map(ask);
    let mut ended = stream::iter(sent).buffer_unordered(at_once.max(1));
    let mut answers = Vec::with_capacity(count);
    while let Some((idx, answer)) = ended.next().await {
        tell(&answer);
        answers.push((idx, answer));
    }
    answers.sort_by_key(|&(idx, _): &(usize, Answer)| idx);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// When each request of a Poisson process comes: the same times whenever it is asked, so that settings are compared under
/// the same load.
fn arrivals(rate: f64, count: usize) -> Vec<Duration> {
    let mut random = Random(0x5eed);
    let mut at = 0.0;
    (0..count)
        .map(|_| {
            let now = Duration::from_secs_f64(at);
            at += -(1.0 - random.unit()).ln() / rate;
            now
        })
        .collect()
}

/// SplitMix64: a few independent-looking draws, the same everywhere.
struct Random(u64);

impl Random {
    /// At least 0 and below 1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ (bits >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_are_a_poisson_process_of_that_rate() {
        let times = arrivals(5.0, 4000);
        assert_eq!(times[0], Duration::ZERO);
        let gaps: Vec<f64> =
            times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((mean - 0.2).abs() < 0.01, "mean {mean}");
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.05, "deviation {}", variance.sqrt());
        assert_eq!(arrivals(5.0, 10)[..], times[..10]);
    }
}
