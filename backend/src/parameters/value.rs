//! How the text of a parameter's value is read into the settings; an error says what is expected.

use super::{Policy, ResponseStatistics, Settings, TemperatureAlone, WhenFull, WhenTooLong};
use crate::contract::Profile;
use spec_core::runtime::{MAX_DRAFT_BRANCHES, Prefill};
use std::str::FromStr;

pub(super) fn write<T>(slot: &mut T, value: Result<T, &'static str>) -> Result<(), &'static str> {
    *slot = value?;
    Ok(())
}

pub(super) fn put<T>(
    slot: &mut Option<T>,
    value: Result<T, &'static str>,
) -> Result<(), &'static str> {
    *slot = Some(value?);
    Ok(())
}

pub(super) fn parsed<T: FromStr>(value: &str, expected: &'static str) -> Result<T, &'static str> {
    value.parse().map_err(|_| expected)
}

pub(super) fn positive(value: &str) -> Result<usize, &'static str> {
    let expected = "a whole number of at least 1";
    parsed(value, expected).and_then(|n| if n > 0 { Ok(n) } else { Err(expected) })
}

pub(super) fn branches(value: &str) -> Result<usize, &'static str> {
    let expected = "a whole number of 1 to 16";
    let in_range = |n| if (1..=MAX_DRAFT_BRANCHES).contains(&n) { Ok(n) } else { Err(expected) };
    parsed(value, expected).and_then(in_range)
}

pub(super) fn count(value: &str) -> Result<usize, &'static str> {
    parsed(value, "a whole number of at least 0")
}

pub(super) fn gpus(value: &str) -> Result<Vec<usize>, &'static str> {
    let expected = "GPU numbers separated by ';': an instance runs on one";
    value.split(';').map(|number| parsed(number.trim(), expected)).collect()
}

pub(super) fn milliseconds(value: &str) -> Result<u64, &'static str> {
    parsed(value, "a whole number of milliseconds")
}

pub(super) fn number(value: &str) -> Result<f32, &'static str> {
    parsed(value, "a number")
}

pub(super) fn boolean(value: &str) -> Result<bool, &'static str> {
    match value {
        "true" | "True" | "TRUE" | "1" => Ok(true),
        "false" | "False" | "FALSE" | "0" => Ok(false),
        _ => Err("true or false"),
    }
}

pub(super) fn only_true(_: &mut Settings, value: &str) -> Result<(), &'static str> {
    if boolean(value) == Ok(true) {
        Ok(())
    } else {
        Err("true: prompts are always computed in chunks")
    }
}

pub(super) fn one_beam(_: &mut Settings, value: &str) -> Result<(), &'static str> {
    if value == "1" { Ok(()) } else { Err("1: there is no beam search") }
}

pub(super) fn profile(settings: &mut Settings, value: &str) -> Result<(), &'static str> {
    settings.profile = match value {
        "text" => Profile::Text,
        "token" => Profile::Token,
        "vllm" => Profile::Vllm,
        _ => return Err("text, token or vllm"),
    };
    Ok(())
}

pub(super) fn draft_len(settings: &mut Settings, value: &str) -> Result<(), &'static str> {
    settings.draft_len = match value {
        "auto" => None,
        _ => Some(parsed(value, "auto or a whole number of at least 0")?),
    };
    Ok(())
}

pub(super) fn lookup(settings: &mut Settings, value: &str) -> Result<(), &'static str> {
    settings.lookup = Some(value.parse().map_err(|_| "off, ngram or suffix")?);
    Ok(())
}

pub(super) fn isa(settings: &mut Settings, value: &str) -> Result<(), &'static str> {
    settings.isa = match value {
        "auto" => None,
        _ => Some(value.parse().map_err(|_| "auto or an instruction set of this machine")?),
    };
    Ok(())
}

pub(super) fn prefill(settings: &mut Settings, value: &str) -> Result<(), &'static str> {
    settings.prefill = match value {
        "auto" => None,
        "exact" => Some(Prefill::Exact),
        "blocks" => Some(Prefill::Blocks),
        "cublaslt" => Some(Prefill::CublasLt),
        _ => return Err("auto, exact, blocks or cublaslt"),
    };
    Ok(())
}

pub(super) fn fraction(settings: &mut Settings, value: &str) -> Result<(), &'static str> {
    let expected = "a number above 0 and at most 1";
    let fraction: f64 = parsed(value, expected)?;
    if !(fraction > 0.0 && fraction <= 1.0) {
        return Err(expected);
    }
    settings.kv_memory_fraction = Some(fraction);
    Ok(())
}

pub(super) fn policy(settings: &mut Settings, value: &str) -> Result<(), &'static str> {
    settings.policy = match value {
        "guaranteed_no_evict" => Policy::GuaranteedNoEvict,
        "max_utilization" => Policy::MaxUtilization,
        _ => return Err("guaranteed_no_evict or max_utilization"),
    };
    Ok(())
}

pub(super) fn when_full(settings: &mut Settings, value: &str) -> Result<(), &'static str> {
    settings.when_full = match value {
        "refuse" => WhenFull::Refuse,
        "hold_back" => WhenFull::HoldBack,
        _ => return Err("refuse or hold_back"),
    };
    Ok(())
}

pub(super) fn when_too_long(settings: &mut Settings, value: &str) -> Result<(), &'static str> {
    settings.when_too_long = match value {
        "clamp" => WhenTooLong::Clamp,
        "refuse" => WhenTooLong::Refuse,
        _ => return Err("clamp or refuse"),
    };
    Ok(())
}

pub(super) fn temperature_alone(settings: &mut Settings, value: &str) -> Result<(), &'static str> {
    settings.temperature_alone = match value {
        "draws" => TemperatureAlone::Draws,
        "greedy" => TemperatureAlone::Greedy,
        _ => return Err("draws or greedy"),
    };
    Ok(())
}

pub(super) fn statistics(settings: &mut Settings, value: &str) -> Result<(), &'static str> {
    settings.response_statistics = match value {
        "off" => ResponseStatistics::Off,
        "ends" => ResponseStatistics::Ends,
        "all" => ResponseStatistics::All,
        _ => return Err("off, ends or all"),
    };
    Ok(())
}

pub(super) fn batching(_: &mut Settings, value: &str) -> Result<(), &'static str> {
    match value {
        "inflight_batching" | "inflight_fused_batching" => Ok(()),
        _ => Err("inflight_batching or inflight_fused_batching"),
    }
}
