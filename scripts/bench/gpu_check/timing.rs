//! How long a graph takes: wall clock over many replays between two waits, so that a device needs no events.

use serde_json::{Value, json};
use spec_core::Result;
use spec_core::testing::cuda::device::{Device, Graph, Launch, Op};
use std::time::Instant;

/// Measurements behind a median.
const SAMPLES: usize = 21;
/// Replays last this long together, so that issuing and waiting, some 20 us, do not count.
const SAMPLE_SECONDS: f64 = 4e-3;

/// Microseconds of something that was measured several times.
#[derive(Clone, Debug)]
pub(crate) struct Timing {
    /// In ascending order.
    samples: Vec<f64>,
    replays: usize,
}

impl Timing {
    /// Of samples in microseconds, each the mean of so many replays.
    pub(crate) fn new(mut samples: Vec<f64>, replays: usize) -> Self {
        samples.sort_by(f64::total_cmp);
        Self { samples, replays }
    }

    /// Times launches of one kernel, whose kind is given, in one graph.
    pub(crate) fn of_kernel(
        kind: &str,
        launches: Vec<Launch>,
        is_emulated: bool,
        device: &mut dyn Device,
    ) -> Result<Self> {
        // A norm lets the next kernel begin before it has itself waited; that kernel must not do the same.
        let overlap = kind != "normalise";
        let ops: Vec<_> =
            launches.into_iter().map(|each| Op::Launch(Launch { overlap, ..each })).collect();
        Self::of(device.record(&ops)?, is_emulated, device)
    }

    /// Times a graph.
    pub(crate) fn of(graph: Graph, is_emulated: bool, device: &mut dyn Device) -> Result<Self> {
        if is_emulated {
            return Ok(Self::new(vec![run(graph, 1, device)?], 1));
        }
        // Also loads the code and fills what stays in the cache.
        run(graph, 3, device)?;
        let once = run(graph, 3, device)? * 1e-6;
        let replays = (SAMPLE_SECONDS / once).ceil().clamp(1.0, 10_000.0) as usize;
        let samples: Result<Vec<f64>> = (0..SAMPLES).map(|_| run(graph, replays, device)).collect();
        Ok(Self::new(samples?, replays))
    }

    /// Each the time of one of `count` equal parts.
    pub(crate) fn of_each(self, count: usize) -> Self {
        let samples = self.samples.into_iter().map(|us| us / count as f64).collect();
        Self { samples, ..self }
    }

    /// The middle one.
    pub(crate) fn median(&self) -> f64 {
        self.samples[self.samples.len() / 2]
    }

    /// With the tenth and the ninetieth of a hundred beside the median.
    pub(crate) fn json(&self) -> Value {
        let Self { samples, replays } = self;
        let at =
            |share: f64| rounded(samples[((samples.len() - 1) as f64 * share).round() as usize]);
        json!({
            "us": rounded(self.median()), "low_us": at(0.1), "high_us": at(0.9),
            "samples": samples.len(), "replays": replays,
        })
    }
}

/// To nanoseconds.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// Microseconds of one of so many replays.
fn run(graph: Graph, replays: usize, device: &mut dyn Device) -> Result<f64> {
    device.wait()?;
    let start = Instant::now();
    for _ in 0..replays {
        device.replay(graph)?;
    }
    device.wait()?;
    Ok(start.elapsed().as_secs_f64() * 1e6 / replays as f64)
}
