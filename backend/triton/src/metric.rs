//! Counters, gauges and histograms of Triton's metrics endpoint. A server built without metrics is no error:
//! its metrics take values and show nothing.
#![allow(unsafe_code)]

use crate::api::{c_string, check, functions};
use crate::error::{Code, Error, Result};
use crate::sys;
use std::collections::HashMap;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

/// What a family of metrics is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind<'a> {
    /// It only grows.
    Counter,
    /// It goes up and down.
    Gauge,
    /// It counts values up to each of these bounds.
    Histogram(&'a [f64]),
}

/// Metrics of one name, that differ by their labels. Backends of one server share the names: let them begin with that of
/// the backend.
///
/// ```no_run
/// use triton_backend::{Family, Kind, Model, Result};
///
/// fn load(model: &Model<'_>) -> Result<()> {
///     let seconds = Kind::Histogram(&[0.1, 1.0, 10.0]);
///     let family = Family::new(seconds, "echo_seconds", "From arrival to the answer")?;
///     let metric = family.metric(&[("model", &model.name()?)])?;
///     metric.observe(0.3);
///     Ok(())
/// }
/// ```
pub struct Family {
    raw: *mut sys::TRITONSERVER_MetricFamily,
    buckets: Option<Vec<f64>>,
}

/// One line of the metrics endpoint (several for a histogram), which is there until the last of its owners is dropped.
pub struct Metric {
    raw: *mut sys::TRITONSERVER_Metric,
}

// SAFETY: Triton's families and metrics guard themselves by locks.
unsafe impl Send for Family {}
// SAFETY: as above.
unsafe impl Sync for Family {}
// SAFETY: as above.
unsafe impl Send for Metric {}
// SAFETY: as above.
unsafe impl Sync for Metric {}

/// Every family that was made. Triton counts the users of a line by family object: two objects of one name
/// would take each other's lines away. It keeps families to the end, and so does this.
static FAMILIES: Mutex<Option<HashMap<String, Arc<Family>>>> = Mutex::new(None);
/// Held while a line is made or taken away: Triton may give out a line that is on its way out, and free it then.
static LINES: Mutex<()> = Mutex::new(());

impl Family {
    /// A family; asked for again by the same name it is the same family, whatever kind and help say then.
    pub fn new(kind: Kind<'_>, name: &str, help: &str) -> Result<Arc<Self>> {
        let mut families = FAMILIES.lock().unwrap_or_else(PoisonError::into_inner);
        let families = families.get_or_insert_default();
        if let Some(family) = families.get(name) {
            return Ok(Arc::clone(family));
        }
        let family = Arc::new(Self::make(kind, name, help)?);
        families.insert(name.to_string(), Arc::clone(&family));
        Ok(family)
    }

    fn make(kind: Kind<'_>, name: &str, help: &str) -> Result<Self> {
        let (raw_kind, buckets) = match kind {
            Kind::Counter => (sys::TRITONSERVER_METRIC_KIND_COUNTER, None),
            Kind::Gauge => (sys::TRITONSERVER_METRIC_KIND_GAUGE, None),
            Kind::Histogram(buckets) => {
                (sys::TRITONSERVER_METRIC_KIND_HISTOGRAM, Some(buckets.to_vec()))
            }
        };
        let (name, help) = (c_string(name), c_string(help));
        let mut raw = ptr::null_mut();
        // SAFETY: Triton copies both strings.
        let made = check(unsafe {
            functions().TRITONSERVER_MetricFamilyNew(
                &mut raw,
                raw_kind,
                name.as_ptr(),
                help.as_ptr(),
            )
        });
        without_metrics(made)?;
        Ok(Self { raw, buckets })
    }

    /// The metric with these labels: the same line for all who ask for it.
    pub fn metric(&self, labels: &[(&str, &str)]) -> Result<Metric> {
        let mut raw = ptr::null_mut();
        if !self.raw.is_null() {
            let labels = Labels::new(labels);
            let args = self.buckets.as_deref().map(HistogramArgs::new).transpose()?;
            let (base, len) = (labels.0.as_ptr().cast_mut().cast(), labels.0.len() as u64);
            // In this order: a thread that may go no further holds no lock.
            let f = functions();
            let _line = LINES.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: the family is alive; labels and arguments outlive the call, which copies them.
            check(unsafe {
                match &args {
                    Some(args) => {
                        f.TRITONSERVER_MetricNewWithArgs(&mut raw, self.raw, base, len, args.0)
                    }
                    None => f.TRITONSERVER_MetricNew(&mut raw, self.raw, base, len),
                }
            })?;
        }
        Ok(Metric { raw })
    }
}

/// A server without metrics says so when a family is made.
fn without_metrics(made: Result<()>) -> Result<()> {
    match made {
        Err(Error { code: Code::Unsupported, .. }) => Ok(()),
        other => other,
    }
}

impl Metric {
    /// Adds to a counter or a gauge.
    pub fn add(&self, value: f64) {
        self.update(|raw| {
            // SAFETY: `update` passes a metric that is alive.
            unsafe { functions().TRITONSERVER_MetricIncrement(raw, value) }
        });
    }

    /// Sets a gauge.
    pub fn set(&self, value: f64) {
        self.update(|raw| {
            // SAFETY: as above.
            unsafe { functions().TRITONSERVER_MetricSet(raw, value) }
        });
    }

    /// Counts a value in a histogram.
    pub fn observe(&self, value: f64) {
        self.update(|raw| {
            // SAFETY: as above.
            unsafe { functions().TRITONSERVER_MetricObserve(raw, value) }
        });
    }

    /// A value that Triton refuses is a fault of ours, but not one to fail a request for.
    fn update(
        &self,
        change: impl FnOnce(*mut sys::TRITONSERVER_Metric) -> *mut sys::TRITONSERVER_Error,
    ) {
        if !self.raw.is_null() {
            let changed = check(change(self.raw));
            debug_assert!(changed.is_ok(), "{changed:?}");
        }
    }
}

impl Drop for Metric {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            let f = functions();
            let _line = LINES.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: ours, and deleted once; families are never deleted.
            let _ = check(unsafe { f.TRITONSERVER_MetricDelete(self.raw) });
        }
    }
}

/// Labels of a metric, as Triton takes them.
struct Labels(Vec<*mut sys::TRITONSERVER_Parameter>);

impl Labels {
    fn new(labels: &[(&str, &str)]) -> Self {
        let parameter = |&(name, value): &(&str, &str)| {
            let (name, value) = (c_string(name), c_string(value));
            // SAFETY: Triton copies both strings.
            unsafe {
                functions().TRITONSERVER_ParameterNew(
                    name.as_ptr(),
                    sys::TRITONSERVER_PARAMETER_STRING,
                    value.as_ptr().cast(),
                )
            }
        };
        Self(labels.iter().map(parameter).collect())
    }
}

impl Drop for Labels {
    fn drop(&mut self) {
        for &parameter in &self.0 {
            // SAFETY: ours, and deleted once.
            unsafe { functions().TRITONSERVER_ParameterDelete(parameter) };
        }
    }
}

/// Bounds of a histogram, as Triton takes them.
struct HistogramArgs(*mut sys::TRITONSERVER_MetricArgs);

impl HistogramArgs {
    fn new(buckets: &[f64]) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: Triton copies the bounds.
        unsafe {
            check(functions().TRITONSERVER_MetricArgsNew(&mut raw))?;
            let args = Self(raw);
            check(functions().TRITONSERVER_MetricArgsSetHistogram(
                raw,
                buckets.as_ptr(),
                buckets.len() as u64,
            ))?;
            Ok(args)
        }
    }
}

impl Drop for HistogramArgs {
    fn drop(&mut self) {
        // SAFETY: ours, and deleted once.
        let _ = check(unsafe { functions().TRITONSERVER_MetricArgsDelete(self.0) });
    }
}
