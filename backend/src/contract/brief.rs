//! A short look at a request, before it is read: what decides when it is read, and whether at all. Nothing of it is
//! copied but the values of [`Contract::BRIEF_INPUTS`]. Whatever is wrong with these is found when it is read.

use super::Contract;
use super::value::{self, Value};
use std::time::Duration;
use triton_backend::{Parameter, Tensor};

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
    /// The inputs whose values a short look needs: a few bytes a row each.
    pub const BRIEF_INPUTS: [&'static str; 2] = [STOP, PRIORITY];
    /// The request parameters that it needs.
    pub const BRIEF_PARAMETERS: [&'static str; 3] = [STOP, PRIORITY, "timeout"];

    /// Looks at a request, of whose `inputs` no others are needed.
    pub fn brief(&self, inputs: &[Tensor], parameters: &[(String, Parameter)]) -> Brief {
        let given = Given { contract: self, inputs, parameters };
        let stop = given.rows(STOP).iter().any(|row| match row {
            Value::Flags(flags) => flags.contains(&true),
            _ => false,
        });
        let priority = given.rows(PRIORITY).first().and_then(|row| match row {
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
    /// The values of an option of this profile, as a tensor or else as a parameter; none where they cannot be read.
    fn rows(&self, name: &str) -> Vec<Value> {
        let profile = self.contract.profile;
        let Some(input) = profile.input(name) else { return Vec::new() };
        let action = &input.option.action;
        if let Some(tensor) = self.inputs.iter().find(|tensor| tensor.name == name) {
            return value::rows(tensor, action, profile.batches()).unwrap_or_default();
        }
        let parameter = self.parameters.iter().find(|(known, _)| known == name);
        let json = parameter.and_then(|(_, parameter)| value::parameter_json(parameter).ok());
        json.and_then(|json| Value::from_json(&json, action).ok()).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Profile;
    use crate::parameters::Settings;
    use spec_core::engine::Limits;
    use triton_backend::DataType;

    fn brief(profile: Profile, inputs: &[Tensor], parameters: &[(&str, Parameter)]) -> Brief {
        let limits =
            Limits { max_draft_len: 4, max_batch_size: 8, max_seq_len: 64, max_num_tokens: 64 };
        let settings = Settings { profile, ..Settings::default() };
        let parameters: Vec<_> =
            parameters.iter().map(|(name, value)| (name.to_string(), value.clone())).collect();
        Contract::new(&settings, &limits, 260).brief(inputs, &parameters)
    }

    fn flags(values: &[u8]) -> Tensor {
        let shape = vec![values.len() as i64, 1];
        Tensor { name: STOP.into(), datatype: DataType::Bool, shape, data: values.to_vec() }
    }

    fn levels(shape: &[i64], levels: &[i32]) -> Tensor {
        let data = levels.iter().flat_map(|level| level.to_le_bytes()).collect();
        Tensor { name: PRIORITY.into(), datatype: DataType::Int32, shape: shape.to_vec(), data }
    }

    #[test]
    fn a_request_to_stop_is_known_by_that_alone() {
        assert!(brief(Profile::Token, &[flags(&[1])], &[]).stop);
        assert!(brief(Profile::Token, &[flags(&[0, 1])], &[]).stop);
        assert!(brief(Profile::Token, &[], &[("stop", Parameter::Bool(true))]).stop);
        assert!(!brief(Profile::Token, &[flags(&[0])], &[]).stop);
        // A tensor wins over a parameter of its name.
        assert!(!brief(Profile::Token, &[flags(&[0])], &[("stop", Parameter::Bool(true))]).stop);
    }

    #[test]
    fn profiles_without_stop_requests_see_none() {
        // vLLM's `stop` is a list of strings.
        let words = Parameter::String("true".into());
        assert!(!brief(Profile::Vllm, &[], &[("stop", words)]).stop);
        assert!(!brief(Profile::Text, &[flags(&[1])], &[]).stop);
    }

    #[test]
    fn a_level_is_an_input_or_a_parameter_in_every_profile() {
        for profile in [Profile::Text, Profile::Token] {
            assert_eq!(brief(profile, &[levels(&[1, 1], &[3])], &[]).priority, Some(3));
            assert_eq!(brief(profile, &[levels(&[2, 1], &[3, 4])], &[]).priority, Some(3));
        }
        assert_eq!(brief(Profile::Vllm, &[levels(&[1], &[3])], &[]).priority, Some(3));
        let parameter = [("priority", Parameter::String("2".into()))];
        assert_eq!(brief(Profile::Vllm, &[], &parameter).priority, Some(2));
        assert_eq!(brief(Profile::Text, &[], &[]).priority, None);
    }

    #[test]
    fn what_is_wrong_is_left_to_whoever_reads_the_request() {
        let broken = Tensor { data: vec![1], ..levels(&[1, 1], &[1]) };
        assert_eq!(brief(Profile::Text, &[broken], &[]), Brief::default());
        assert_eq!(brief(Profile::Text, &[levels(&[1, 1], &[-1])], &[]), Brief::default());
        let timeout = [("timeout", Parameter::Bool(true))];
        assert_eq!(brief(Profile::Text, &[], &timeout), Brief::default());
    }

    #[test]
    fn a_timeout_is_microseconds() {
        let timeout = [("timeout", Parameter::Int(1500))];
        let expected = Some(Duration::from_micros(1500));
        assert_eq!(brief(Profile::Text, &[], &timeout).timeout, expected);
    }
}
