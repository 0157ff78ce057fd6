//! Writes GGUF v3 as a stream: first everything is declared, then tensor data follows in the declared order, so that a
//! file of any size is written in little memory.

use super::codec::Codec;
use super::gguf::{ALIGNMENT_DEFAULT, MAGIC, ScalarArray, StrArray, Type, Value};
use super::tensor::tensor_bytes;
use std::io::{self, Write};

/// What a file will hold.
#[derive(Default)]
pub struct Plan {
    entries: Vec<u8>,
    entry_count: u64,
    directory: Vec<u8>,
    /// Name and bytes of each tensor.
    tensors: Vec<(String, u64)>,
    data_bytes: u64,
}

impl Plan {
    /// Nothing yet.
    pub fn new() -> Plan {
        Plan::default()
    }

    /// Adds a metadata entry.
    pub fn meta(&mut self, key: &str, value: &Value) {
        put_str(&mut self.entries, key);
        put_value(&mut self.entries, value);
        self.entry_count += 1;
    }

    /// Declares the next tensor, `dims` row-major with the row width last.
    ///
    /// # Panics
    /// If the shape does not fit the codec: a writer chooses both.
    pub fn tensor(&mut self, name: &str, codec: Codec, dims: &[usize]) {
        let len = tensor_bytes(codec, dims).expect("the codec was chosen for this shape");
        let ggml_type = codec.info().ggml_type.expect("a codec that GGUF holds");
        let d = &mut self.directory;
        put_str(d, name);
        d.extend((dims.len() as u32).to_le_bytes());
        dims.iter().rev().for_each(|&n| d.extend((n as u64).to_le_bytes()));
        d.extend(ggml_type.to_le_bytes());
        d.extend(self.data_bytes.to_le_bytes());
        self.data_bytes += len.next_multiple_of(ALIGNMENT_DEFAULT);
        self.tensors.push((name.to_owned(), len));
    }

    /// Bytes of all tensor data with its padding.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Writes the header and returns the body to fill.
    pub fn start<W: Write>(self, mut out: W) -> io::Result<Body<W>> {
        let mut head = Vec::with_capacity(24);
        head.extend(MAGIC);
        head.extend(3u32.to_le_bytes());
        head.extend((self.tensors.len() as u64).to_le_bytes());
        head.extend(self.entry_count.to_le_bytes());
        out.write_all(&head)?;
        out.write_all(&self.entries)?;
        out.write_all(&self.directory)?;
        let written = (head.len() + self.entries.len() + self.directory.len()) as u64;
        pad(&mut out, written)?;
        Ok(Body { out, tensors: self.tensors.into_iter(), current: None })
    }
}

/// Takes tensor data in the order in which the plan declared it.
pub struct Body<W> {
    out: W,
    tensors: std::vec::IntoIter<(String, u64)>,
    /// The tensor being written: name, bytes in all, bytes so far.
    current: Option<(String, u64, u64)>,
}

impl<W: Write> Body<W> {
    /// Starts the next tensor, which must be `name`.
    pub fn begin(&mut self, name: &str) -> io::Result<()> {
        self.end()?;
        let (declared, len) = self.tensors.next().expect("a declared tensor is left");
        assert_eq!(declared, name, "tensors come in the declared order");
        self.current = Some((declared, len, 0));
        Ok(())
    }

    /// Writes the next bytes of the tensor begun last.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (name, len, done) = self.current.as_mut().expect("a tensor was begun");
        *done += bytes.len() as u64;
        assert!(*done <= *len, "{name}: {done} bytes of {len}");
        self.out.write_all(bytes)
    }

    /// Pads after the tensor that was being written; it must be whole.
    fn end(&mut self) -> io::Result<()> {
        if let Some((name, len, done)) = self.current.take() {
            assert_eq!(done, len, "{name} is not whole");
            pad(&mut self.out, len)?;
        }
        Ok(())
    }

    /// Ends the file and gives the writer back; every declared tensor must have been written.
    pub fn finish(mut self) -> io::Result<W> {
        self.end()?;
        assert!(self.tensors.next().is_none(), "a declared tensor was not written");
        self.out.flush()?;
        Ok(self.out)
    }
}

fn pad(out: &mut impl Write, written: u64) -> io::Result<()> {
    const ZEROS: [u8; ALIGNMENT_DEFAULT as usize] = [0; ALIGNMENT_DEFAULT as usize];
    out.write_all(&ZEROS[..(written.next_multiple_of(ALIGNMENT_DEFAULT) - written) as usize])
}

fn put_str(out: &mut Vec<u8>, s: &str) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}

fn put_type(out: &mut Vec<u8>, ty: Type) {
    out.extend((ty as u32).to_le_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    fn scalar<const N: usize>(out: &mut Vec<u8>, ty: Type, bytes: [u8; N]) {
        put_type(out, ty);
        out.extend(bytes);
    }
    match value {
        Value::U8(v) => scalar(out, Type::U8, v.to_le_bytes()),
        Value::I8(v) => scalar(out, Type::I8, v.to_le_bytes()),
        Value::U16(v) => scalar(out, Type::U16, v.to_le_bytes()),
        Value::I16(v) => scalar(out, Type::I16, v.to_le_bytes()),
        Value::U32(v) => scalar(out, Type::U32, v.to_le_bytes()),
        Value::I32(v) => scalar(out, Type::I32, v.to_le_bytes()),
        Value::F32(v) => scalar(out, Type::F32, v.to_le_bytes()),
        Value::Bool(v) => scalar(out, Type::Bool, [u8::from(*v)]),
        Value::U64(v) => scalar(out, Type::U64, v.to_le_bytes()),
        Value::I64(v) => scalar(out, Type::I64, v.to_le_bytes()),
        Value::F64(v) => scalar(out, Type::F64, v.to_le_bytes()),
        Value::Str(s) => {
            put_type(out, Type::Str);
            put_str(out, s);
        }
        Value::Scalars(a) => put_scalars(out, a),
        Value::Strs(a) => put_strs(out, a),
    }
}

fn put_scalars(out: &mut Vec<u8>, a: &ScalarArray) {
    put_type(out, Type::Array);
    put_type(out, a.ty);
    out.extend((a.len() as u64).to_le_bytes());
    out.extend(&a.bytes);
}

fn put_strs(out: &mut Vec<u8>, a: &StrArray) {
    put_type(out, Type::Array);
    put_type(out, Type::Str);
    out.extend((a.len() as u64).to_le_bytes());
    a.iter().for_each(|s| put_str(out, s));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::gguf;
    use crate::format::input::NamedBytes;
    use std::path::Path;

    #[test]
    fn what_is_written_is_read_back() {
        let mut plan = Plan::new();
        plan.meta("general.architecture", &Value::Str("llama".into()));
        plan.meta("n", &Value::U64(1 << 40));
        plan.meta("ids", &Value::Scalars(ScalarArray::from_i32s([-1, 2, 3])));
        plan.meta("words", &Value::Strs(["a", "", "çé"].into_iter().collect()));
        plan.tensor("a", Codec::Q4_0, &[3, 64]);
        plan.tensor("b", Codec::F32, &[2, 1, 5]);
        let mut body = plan.start(Vec::new()).unwrap();
        body.begin("a").unwrap();
        body.write(&[7; 50]).unwrap();
        body.write(&[8; 3 * 36 - 50]).unwrap();
        body.begin("b").unwrap();
        body.write(&[9; 40]).unwrap();
        let bytes = body.finish().unwrap();

        let h = gguf::parse(&NamedBytes { path: Path::new("x.gguf"), bytes: &bytes }).unwrap();
        assert_eq!(h.version, 3);
        assert_eq!(h.meta.str("general.architecture").unwrap(), "llama");
        assert_eq!(h.meta.usize("n").unwrap(), 1 << 40);
        assert!(
            h.meta.u32("n").unwrap_err().to_string().contains("x.gguf: n: expected an integer that fits u32")
        );
        assert_eq!(h.meta.opt_ints("ids").unwrap().unwrap(), [-1, 2, 3]);
        assert_eq!(h.meta.strs("words").unwrap().iter().collect::<Vec<_>>(), ["a", "", "çé"]);
        assert_eq!(h.tensors[0].dims, [3, 64]);
        assert_eq!(h.tensors[1].dims, [2, 1, 5]);
        let b = &h.tensors[1];
        assert_eq!(&bytes[b.offset as usize..][..b.len as usize], &[9; 40]);
        assert_eq!(bytes.len() as u64, h.data_offset + 128 + 64);
    }
}
