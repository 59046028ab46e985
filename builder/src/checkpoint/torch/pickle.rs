//! The one file that knows pickles: a machine with a stack that reads dictionaries of tensors. It calls nothing. What a
//! pickle would have Python call is compared with four names; every other is an error.

use anyhow::{Context, Result, bail, ensure};
use std::rc::Rc;

/// Tuples in tuples at most.
const MAX_DEPTH: usize = 8;
/// Dimensions of a tensor at most.
const MAX_DIMENSIONS: usize = 8;
/// Bytes of a name at most: of a tensor, or of a module and what is in it.
const MAX_NAME: usize = 1000;

/// What a pickle holds, as far as it is about tensors.
#[derive(Clone, Debug)]
pub(super) enum Value {
    None,
    Bool,
    Int(i64),
    Float,
    Text(Rc<str>),
    /// How deep tuples are in it, and what it holds.
    Tuple(usize, Rc<[Value]>),
    List,
    /// Filled later through its number.
    Dict(usize),
    /// Something of a module, such as `torch.FloatStorage`.
    Global(Rc<str>),
    Storage(Rc<Storage>),
    Tensor(Rc<Tensor>),
}

/// A file of the archive that holds numbers.
#[derive(Debug)]
pub(super) struct Storage {
    /// Its class in `torch`, such as `FloatStorage`.
    pub(super) class: Rc<str>,
    /// Its file.
    pub(super) key: Rc<str>,
}

/// A view of a storage.
#[derive(Debug)]
pub(super) struct Tensor {
    pub(super) storage: Rc<Storage>,
    /// Values of the storage before its own.
    pub(super) first: u64,
    pub(super) shape: Vec<u64>,
    pub(super) strides: Vec<u64>,
}

impl Value {
    /// What it is, for errors.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Bool => "a truth value",
            Self::Int(_) => "a whole number",
            Self::Float => "a number",
            Self::Text(_) => "a text",
            Self::Tuple(..) => "a tuple",
            Self::List => "a list",
            Self::Dict(_) => "a dictionary",
            Self::Global(_) => "a class or function",
            Self::Storage(_) => "a storage",
            Self::Tensor(_) => "a tensor",
        }
    }

    fn text(&self) -> Result<Rc<str>> {
        match self {
            Self::Text(text) => Ok(Rc::clone(text)),
            other => bail!("found {}, expected a text", other.kind()),
        }
    }

    fn count(&self) -> Result<u64> {
        match self {
            Self::Int(value) => u64::try_from(*value)
                .with_context(|| format!("found {value}, expected a number of values")),
            other => bail!("found {}, expected a whole number", other.kind()),
        }
    }

    fn counts(&self) -> Result<Vec<u64>> {
        match self {
            Self::Tuple(_, values) => {
                let (found, most) = (values.len(), MAX_DIMENSIONS);
                ensure!(found <= most, "a tensor of {found} dimensions, expected at most {most}");
                values.iter().map(Self::count).collect()
            }
            other => bail!("found {}, expected a tuple", other.kind()),
        }
    }
}

/// A dictionary in its order.
type Items = Vec<(Rc<str>, Value)>;

/// The dictionary that a pickle makes. What takes memory here takes bytes of the pickle: whatever is named again is
/// shared.
pub(super) fn run(program: &[u8]) -> Result<Items> {
    let mut machine = Machine { rest: program, ..Machine::default() };
    loop {
        let at = program.len() - machine.rest.len();
        let done = machine.step().with_context(|| format!("at byte {at}"))?;
        if let Some(value) = done {
            let Value::Dict(number) = value else {
                bail!("it is {}, expected a dictionary of tensors", value.kind());
            };
            return Ok(machine.dicts.swap_remove(number));
        }
    }
}

#[derive(Default)]
struct Machine<'a> {
    rest: &'a [u8],
    stack: Vec<Value>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: Vec<Option<Value>>,
    dicts: Vec<Items>,
}

impl<'a> Machine<'a> {
    /// Runs one instruction; the last one gives what was made.
    fn step(&mut self) -> Result<Option<Value>> {
        let [code] = self.array()?;
        match code {
            // PROTO, FRAME
            0x80 => {
                let [version] = self.array()?;
                ensure!(version <= 5, "protocol {version}, expected at most 5");
            }
            0x95 => drop(self.array::<8>()?),
            // STOP
            b'.' => return Ok(Some(self.pop()?)),
            b'(' => self.marks.push(self.stack.len()),
            b'0' => drop(self.pop()?),

            b'N' => self.stack.push(Value::None),
            0x88 | 0x89 => self.stack.push(Value::Bool),
            b'J' => {
                let value = i32::from_le_bytes(self.array()?);
                self.stack.push(Value::Int(value.into()));
            }
            b'K' => {
                let [value] = self.array()?;
                self.stack.push(Value::Int(value.into()));
            }
            b'M' => {
                let value = u16::from_le_bytes(self.array()?);
                self.stack.push(Value::Int(value.into()));
            }
            // LONG1: a signed number of as many bytes as its first says
            0x8a => {
                let [len] = self.array()?;
                ensure!(len <= 8, "a number of {len} bytes, expected at most 8");
                let bytes = self.bytes(len.into())?;
                let fill = if bytes.last().is_some_and(|&last| last >= 0x80) { 0xff } else { 0 };
                let mut value = [fill; 8];
                value[..bytes.len()].copy_from_slice(bytes);
                self.stack.push(Value::Int(i64::from_le_bytes(value)));
            }
            b'G' => {
                self.array::<8>()?;
                self.stack.push(Value::Float);
            }
            // BINUNICODE, SHORT_BINUNICODE, and SHORT_BINSTRING of Python 2
            b'X' => {
                let len = u32::from_le_bytes(self.array()?);
                self.push_text(len as usize)?;
            }
            0x8c | b'U' => {
                let [len] = self.array()?;
                self.push_text(len.into())?;
            }

            b')' => self.push_tuple(Vec::new())?,
            0x85..=0x87 => {
                let len = usize::from(code - 0x84);
                let from = self.stack.len().checked_sub(len).context("an empty stack")?;
                let values = self.stack.split_off(from);
                self.push_tuple(values)?;
            }
            b't' => {
                let values = self.pop_to_mark()?;
                self.push_tuple(values)?;
            }
            b']' => self.stack.push(Value::List),
            b'a' => {
                self.pop()?;
                self.expect_top("a list", |top| matches!(top, Value::List))?;
            }
            b'e' => {
                self.pop_to_mark()?;
                self.expect_top("a list", |top| matches!(top, Value::List))?;
            }
            b'}' => self.push_dict(),
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set_items(vec![key, value])?;
            }
            b'u' => {
                let items = self.pop_to_mark()?;
                self.set_items(items)?;
            }

            // GLOBAL, STACK_GLOBAL
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push_global(module, name)?;
            }
            0x93 => {
                let (name, module) = (self.pop()?.text()?, self.pop()?.text()?);
                self.push_global(&module, &name)?;
            }
            // BINPERSID
            b'Q' => {
                let id = self.pop()?;
                let storage = storage(&id).context("a storage")?;
                self.stack.push(Value::Storage(storage.into()));
            }
            // REDUCE
            b'R' => {
                let (args, function) = (self.pop()?, self.pop()?);
                self.call(&function, &args)?;
            }
            // BUILD: attributes of a dictionary, which say nothing about its tensors
            b'b' => {
                self.pop()?;
                self.expect_top("a dictionary", |top| matches!(top, Value::Dict(_)))?;
            }

            // BINPUT, LONG_BINPUT, MEMOIZE, BINGET, LONG_BINGET
            b'q' => {
                let [number] = self.array()?;
                self.remember(number.into())?;
            }
            b'r' => {
                let number = u32::from_le_bytes(self.array()?);
                self.remember(number as usize)?;
            }
            0x94 => self.remember(self.memo.len())?,
            b'h' => {
                let [number] = self.array()?;
                self.recall(number.into())?;
            }
            b'j' => {
                let number = u32::from_le_bytes(self.array()?);
                self.recall(number as usize)?;
            }
            other => bail!("the instruction {other:#04x} makes no dictionary of tensors"),
        }
        Ok(None)
    }

    /// What Python would call.
    fn call(&mut self, function: &Value, args: &Value) -> Result<()> {
        let (Value::Global(name), Value::Tuple(_, args)) = (function, args) else {
            bail!("a call of {} with {}", function.kind(), args.kind());
        };
        match (&**name, &**args) {
            ("collections.OrderedDict", []) => self.push_dict(),
            (
                "torch._utils._rebuild_tensor_v2",
                [Value::Storage(storage), first, shape, strides, ..],
            ) => {
                let (storage, first) = (Rc::clone(storage), first.count()?);
                let (shape, strides) = (shape.counts()?, strides.counts()?);
                let tensor = Tensor { storage, first, shape, strides };
                self.stack.push(Value::Tensor(tensor.into()));
            }
            ("torch._utils._rebuild_parameter", [tensor @ Value::Tensor(_), ..]) => {
                self.stack.push(tensor.clone());
            }
            _ => bail!("it calls `{name}` with {} arguments: only tensors are read", args.len()),
        }
        Ok(())
    }

    fn set_items(&mut self, items: Vec<Value>) -> Result<()> {
        let Some(Value::Dict(number)) = self.stack.last() else {
            bail!("values for what is no dictionary");
        };
        let (pairs, []) = items.as_chunks::<2>() else { bail!("a key without a value") };
        for [key, value] in pairs {
            let (key, most) = (key.text()?, MAX_NAME);
            ensure!(key.len() <= most, "a name of {} bytes, expected at most {most}", key.len());
            self.dicts[*number].push((key, value.clone()));
        }
        Ok(())
    }

    fn push_dict(&mut self) {
        self.stack.push(Value::Dict(self.dicts.len()));
        self.dicts.push(Vec::new());
    }

    fn push_tuple(&mut self, values: Vec<Value>) -> Result<()> {
        let depth = |value: &Value| if let Value::Tuple(depth, _) = value { *depth } else { 0 };
        let depth = 1 + values.iter().map(depth).max().unwrap_or(0);
        ensure!(depth <= MAX_DEPTH, "tuples in {depth} tuples, expected at most {MAX_DEPTH}");
        self.stack.push(Value::Tuple(depth, values.into()));
        Ok(())
    }

    fn push_global(&mut self, module: &str, name: &str) -> Result<()> {
        let len = module.len() + name.len();
        ensure!(len <= MAX_NAME, "a name of {len} bytes, expected at most {MAX_NAME}");
        self.stack.push(Value::Global(format!("{module}.{name}").into()));
        Ok(())
    }

    fn push_text(&mut self, len: usize) -> Result<()> {
        let text = std::str::from_utf8(self.bytes(len)?).context("a text is no UTF-8")?;
        self.stack.push(Value::Text(text.into()));
        Ok(())
    }

    fn expect_top(&self, what: &str, is_it: impl Fn(&Value) -> bool) -> Result<()> {
        ensure!(self.stack.last().is_some_and(is_it), "the top of the stack is not {what}");
        Ok(())
    }

    fn pop(&mut self) -> Result<Value> {
        self.stack.pop().context("an empty stack")
    }

    fn pop_to_mark(&mut self) -> Result<Vec<Value>> {
        let mark = self.marks.pop().context("no mark on the stack")?;
        ensure!(mark <= self.stack.len(), "a mark above the stack");
        Ok(self.stack.split_off(mark))
    }

    /// Numbers are given in order, each once: so a memo is no longer than its pickle.
    fn remember(&mut self, number: usize) -> Result<()> {
        let value = self.stack.last().context("an empty stack")?.clone();
        ensure!(number <= self.memo.len(), "memo {number} behind {}", self.memo.len());
        if number == self.memo.len() {
            self.memo.push(None);
        }
        self.memo[number] = Some(value);
        Ok(())
    }

    fn recall(&mut self, number: usize) -> Result<()> {
        let value = self.memo.get(number).cloned().flatten();
        self.stack.push(value.with_context(|| format!("memo {number} holds nothing"))?);
        Ok(())
    }

    fn line(&mut self) -> Result<&'a str> {
        let len = self.rest.iter().position(|&byte| byte == b'\n').context("it ends too early")?;
        let line = std::str::from_utf8(self.bytes(len)?).context("a name is no UTF-8")?;
        self.bytes(1)?;
        Ok(line)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.bytes(N)?.try_into()?)
    }

    fn bytes(&mut self, len: usize) -> Result<&'a [u8]> {
        let (bytes, rest) = self.rest.split_at_checked(len).context("it ends too early")?;
        self.rest = rest;
        Ok(bytes)
    }
}

/// What is said of a storage: ('storage', its class, its file, a device, a number of values).
fn storage(id: &Value) -> Result<Storage> {
    let Value::Tuple(_, id) = id else { bail!("found {}, expected a tuple", id.kind()) };
    match &**id {
        [Value::Text(kind), Value::Global(class), key, _, _] if &**kind == "storage" => {
            let class = class.strip_prefix("torch.").unwrap_or(class);
            Ok(Storage { class: class.into(), key: key.text()? })
        }
        _ => bail!("found a tuple of {}, expected one of storage", id.len()),
    }
}
