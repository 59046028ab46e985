//! One Triton request, read: tensors over request parameters over the model's defaults.

use super::form::{Form, Words, excerpt};
use super::table::{Action, Checked, Input, Wrong};
use super::value::{self, Value};
use super::{Call, Contract, Profile};
use spec_core::tokenizer::Tokenizer;
use std::time::Duration;
use triton_backend::{Error, Result};
use triton_backend::{Parameter, Tensor};

/// All sampling options in one object.
const SAMPLING_PARAMETERS: &str = "sampling_parameters";

/// Reads a request for `contract`.
pub(super) fn parse(
    contract: &Contract,
    inputs: &[Tensor],
    parameters: &[(String, Parameter)],
    tokenizer: &Tokenizer,
) -> Result<Call> {
    let profile = contract.profile;
    let mut given = Given::default();
    given.tensors(profile, inputs)?;
    let mut common = Form::default();
    given.parameters(profile, parameters, &mut common)?;
    let forms = given.forms(common)?;
    let (streams, report, fan_out) = (forms[0].streams, forms[0].report, forms[0].fan_out());
    let shared = |form: &Form| (form.streams, form.report, form.fan_out());
    if forms.iter().any(|form| shared(form) != (streams, report, fan_out)) {
        return Err(Error::invalid_arg("rows of a batch differ in what they stream or return"));
    }
    if streams && !contract.settings.decoupled {
        return Err(Error::invalid_arg(
            "Streaming is only supported if model is deployed using decoupled mode.",
        ));
    }
    // All that takes no time comes first.
    fan_out.check(contract, forms.len(), streams)?;
    forms.iter().try_for_each(|form| form.check(contract))?;
    Words::check(&forms)?;
    let mut words = Words::new(tokenizer);
    let rows = forms.into_iter().map(|form| form.into_row(contract, &mut words));
    let rows = rows.collect::<Result<_>>()?;
    Ok(Call { rows, fan_out, streams, report, timeout: timeout(parameters)? })
}

/// Triton's gRPC frontend takes `timeout` out of the parameters, its generate endpoint leaves it there.
pub(super) fn timeout(parameters: &[(String, Parameter)]) -> Result<Option<Duration>> {
    let Some((_, given)) = parameters.iter().find(|(name, _)| name == "timeout") else {
        return Ok(None);
    };
    let us = match given {
        Parameter::Int(us) => u64::try_from(*us).ok(),
        Parameter::String(text) => text.parse().ok(),
        Parameter::Bool(_) | Parameter::Double(_) => None,
    };
    let wrong = || {
        let given = excerpt(&format!("{given:?}"));
        Error::invalid_arg(format!("timeout: {given} is no number of microseconds"))
    };
    let us = us.ok_or_else(wrong)?;
    Ok((us > 0).then(|| Duration::from_micros(us)))
}

/// Input tensors, cut into rows.
#[derive(Default)]
struct Given {
    columns: Vec<(&'static Input, Vec<Value>)>,
}

impl Given {
    fn tensors(&mut self, profile: Profile, inputs: &[Tensor]) -> Result<()> {
        for tensor in inputs {
            let input = profile.input(&tensor.name).ok_or_else(|| unknown(&tensor.name))?;
            if self.has(input.name) {
                return Err(Error::invalid_arg(format!("{}: given twice", input.name)));
            }
            input.refused().map_err(|wrong| wrong.into_error(input.name))?;
            let rows = value::rows(tensor, &input.option.action, profile.batches())?;
            if let Some((first, other)) = self.columns.first()
                && other.len() != rows.len()
            {
                return Err(Error::invalid_arg(format!(
                    "{}: a batch of {}, {} has one of {}",
                    input.name,
                    rows.len(),
                    first.name,
                    other.len()
                )));
            }
            self.columns.push((input, rows));
        }
        Ok(())
    }

    fn has(&self, name: &str) -> bool {
        self.columns.iter().any(|(input, _)| input.name == name)
    }

    /// Options that come as request parameters hold for all rows, where no tensor says otherwise.
    fn parameters(
        &self,
        profile: Profile,
        parameters: &[(String, Parameter)],
        form: &mut Form,
    ) -> Result<()> {
        // Options in it win over those beside it, in whatever order they came.
        let (whole, single): (Vec<_>, Vec<_>) =
            parameters.iter().enumerate().partition(|(_, (name, _))| name == SAMPLING_PARAMETERS);
        for (idx, (name, parameter)) in single.into_iter().chain(whole) {
            if is_reserved(name) || self.has(name) {
                continue;
            }
            let all = profile.inputs().iter().chain(profile.parameters());
            let input = all.into_iter().find(|input| input.name == name);
            let input = input.ok_or_else(|| unknown_parameter(name))?;
            if parameters[..idx].iter().any(|(earlier, _)| earlier == name) {
                return Err(Error::invalid_arg(format!("{name}: given twice")));
            }
            let json = value::parameter_json(parameter).map_err(|wrong| wrong.into_error(name))?;
            input.set(form, &json).map_err(|wrong| wrong.into_error(name))?;
        }
        Ok(())
    }

    fn forms(self, common: Form) -> Result<Vec<Form>> {
        let num_rows = self.columns.first().map_or(1, |(_, rows)| rows.len());
        let mut forms = vec![common; num_rows];
        for (input, rows) in self.columns {
            for (form, value) in forms.iter_mut().zip(rows) {
                value
                    .apply(&input.option.action, form)
                    .map_err(|wrong| wrong.into_error(input.name))?;
            }
        }
        Ok(forms)
    }
}

impl Profile {
    /// The input of this name.
    pub(super) fn input(self, name: &str) -> Option<&'static Input> {
        self.inputs().iter().find(|input| input.name == name)
    }
}

impl Input {
    /// An error where it is only there to be refused.
    fn refused(&self) -> Checked {
        match self.option.action {
            Action::Refused(..) => {
                Err(Wrong::NotBuilt(format!("not supported, {}", self.option.help)))
            }
            _ => Ok(()),
        }
    }

    /// Takes a parameter, or a field of a JSON object.
    pub(super) fn set(&self, form: &mut Form, json: &serde_json::Value) -> Checked {
        self.refused()?;
        Value::from_json(json, &self.option.action)?.apply(&self.option.action, form)
    }
}

/// What Triton's frontends add of themselves, and what upstream's clients send that means nothing there either.
fn is_reserved(name: &str) -> bool {
    const OF_TRITON: [&str; 5] = ["id", "sequence_id", "sequence_start", "sequence_end", "timeout"];
    const OF_CLIENTS: [&str; 1] = ["Streaming"];
    name.starts_with("triton_")
        || name.starts_with("binary_data")
        || OF_TRITON.contains(&name)
        || OF_CLIENTS.contains(&name)
}

fn unknown(name: &str) -> Error {
    Error::invalid_arg(format!("input '{}' is not known", excerpt(name)))
}

fn unknown_parameter(name: &str) -> Error {
    Error::invalid_arg(format!("request parameter '{}' is not known", excerpt(name)))
}
