//! A short look at a request, before it is read: what decides when it is read, and whether at all. Nothing of it is
//! copied but the values of [`Contract::BRIEF_INPUTS`]. Whatever is wrong with these is found when it is read.

use super::Contract;
use super::value::{self, Value};
use crate::triton::{Parameter, Tensor};
use std::time::Duration;

/// What a short look tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Brief {
    /// It ends the requests of its name, and asks for nothing else.
    pub stop: bool,
    /// The level of priority that it names.
    pub priority: Option<u32>,
    /// How long its client waits, where it said so in the parameters.
    pub timeout: Option<Duration>,
}

const STOP: &str = "stop";
const PRIORITY: &str = "priority";

impl Contract {
    /// The inputs whose values a short look needs; each is a few bytes.
    pub const BRIEF_INPUTS: [&'static str; 2] = [STOP, PRIORITY];

    /// Looks at a request, of whose `inputs` no others are needed.
    pub fn brief(&self, inputs: &[Tensor], parameters: &[(String, Parameter)]) -> Brief {
        let given = Given { contract: self, inputs, parameters };
        let stop = given.value(STOP).is_some_and(|value| match value {
            Value::Flags(flags) => flags.contains(&true),
            _ => false,
        });
        let priority = given.value(PRIORITY).and_then(|value| match value {
            Value::Ints(levels) => u32::try_from(*levels.first()?).ok(),
            _ => None,
        });
        Brief { stop, priority, timeout: super::parse::timeout(parameters).ok().flatten() }
    }
}

struct Given<'a> {
    contract: &'a Contract,
    inputs: &'a [Tensor],
    parameters: &'a [(String, Parameter)],
}

impl Given<'_> {
    /// The value of an option of this profile, as a tensor or else as a parameter.
    fn value(&self, name: &str) -> Option<Value> {
        let profile = self.contract.profile;
        let action = &profile.input(name)?.option.action;
        if let Some(tensor) = self.inputs.iter().find(|tensor| tensor.name == name) {
            return value::rows(tensor, action, profile.batches()).ok()?.into_iter().next();
        }
        let (_, parameter) = self.parameters.iter().find(|(known, _)| known == name)?;
        let json = value::parameter_json(parameter).ok()?;
        Value::from_json(&json, action).ok()
    }
}
