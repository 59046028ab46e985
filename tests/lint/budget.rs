//! What the inner loops of kernels may take: the figures that `scripts/gpu-predict --table` has found, which also say how fast
//! a model is predicted to be.

use super::clocks::Code;
use serde_json::Value;
use spec_kernels::Variant;
use std::collections::BTreeMap;

/// Figures by name.
pub(crate) type Figures = BTreeMap<String, u64>;

/// Shares by which a figure may be above and below its budget. What has become a tenth better is written down, so that it
/// stays so.
const WORSE: f64 = 0.03;
const BETTER: f64 = 0.1;

const REMEDY: &str = "if it is to be so, scripts/gpu-predict --table writes it down";

/// Budgets by variant.
pub(crate) fn of_table() -> BTreeMap<String, Figures> {
    let table: Value =
        serde_json::from_str(include_str!("../../builder/src/plan/gpu.json")).unwrap();
    let budgets: BTreeMap<String, Figures> =
        serde_json::from_value(table["budgets"].clone()).unwrap();
    assert!(budgets.len() > 30, "{} budgets", budgets.len());
    budgets
}

/// The same figures of a kernel as it is.
pub(crate) fn figures(variant: &Variant, code: &Code) -> Figures {
    let figures = match variant.kernel {
        "gemm" => code.product(),
        "attention" => code.attention(),
        other => panic!("{other} has no budget"),
    };
    figures.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

/// What of a kernel is not as its budget says.
pub(crate) fn check(budget: &Figures, found: &Figures) -> Vec<String> {
    let complaint = |(name, &expected): (&String, &u64)| {
        let Some(&value) = found.get(name) else {
            return Some(format!("no {name} was found: where its loop was there is none"));
        };
        let change = value as f64 / expected as f64 - 1.0;
        let is_as_expected = (-BETTER..=WORSE).contains(&change);
        (!is_as_expected).then(|| format!("{name} is {value}, expected {expected}: {REMEDY}"))
    };
    budget.iter().filter_map(complaint).collect()
}

#[test]
fn what_is_worse_much_better_or_missing_is_told() {
    let budget = Figures::from([("unit_clocks".into(), 300), ("unit_instructions".into(), 70)]);
    let found =
        |clocks| Figures::from([("unit_clocks".into(), clocks), ("unit_instructions".into(), 70)]);
    for clocks in [275, 300, 308] {
        assert_eq!(check(&budget, &found(clocks)), Vec::<String>::new());
    }
    for clocks in [265, 310] {
        let complaints = check(&budget, &found(clocks));
        assert_eq!(complaints, [format!("unit_clocks is {clocks}, expected 300: {REMEDY}")]);
    }
    assert_eq!(check(&budget, &Figures::new()).len(), 2);
}
