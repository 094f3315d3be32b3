// SPDX-License-Identifier: Apache-2.0
// Calls of a Rust function in another process. Frames of a length and values, each behind a tag.
#[allow(dead_code, unused)]
mod sporeloom_rpc {
    use ::std::any::Any;
    use ::std::boxed::Box;
    use ::std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
    use ::std::convert::{TryFrom, TryInto};
    use ::std::fmt;
    use ::std::fs::File;
    use ::std::hash::Hash;
    use ::std::io::{Read, Write};
    use ::std::mem::ManuallyDrop;
    use ::std::os::unix::io::FromRawFd;
    use ::std::string::{String, ToString};
    use ::std::vec::Vec;

    const INPUT: i32 = 3;
    const OUTPUT: i32 = 4;
    const MAX_BYTES: u64 = 1 << 26;

    pub struct Input {
        bytes: Vec<u8>,
        at: usize,
    }

    impl Input {
        fn next(&mut self, size: usize) -> &[u8] {
            if size > self.bytes.len() - self.at {
                panic!("a value is cut off");
            }
            self.at += size;
            &self.bytes[self.at - size..self.at]
        }
        fn expect(&mut self, tag: u8) {
            if self.next(1)[0] != tag {
                panic!("a value of another type was expected");
            }
        }
        fn count(&mut self) -> usize {
            let count = u64::from_le_bytes(self.next(8).try_into().unwrap()) as usize;
            if count > self.bytes.len() {
                panic!("a value is too large");
            }
            count
        }
        pub fn take<T: Take>(&mut self) -> T {
            T::take(self)
        }
    }

    pub trait Put {
        fn put(&self, out: &mut Vec<u8>);
    }
    pub trait Take: Sized {
        fn take(from: &mut Input) -> Self;
    }

    pub fn put<T: Put + ?Sized>(value: &T, out: &mut Vec<u8>) {
        value.put(out)
    }
    fn put_count(count: usize, out: &mut Vec<u8>) {
        out.extend_from_slice(&(count as u64).to_le_bytes());
    }

    macro_rules! integers { ($($kind:ty),*) => { $(
        impl Put for $kind {
            fn put(&self, out: &mut Vec<u8>) {
                out.push(b'i');
                out.extend_from_slice(&(*self as i128).to_le_bytes());
            }
        }
        impl Take for $kind {
            fn take(from: &mut Input) -> Self {
                from.expect(b'i');
                let wide = i128::from_le_bytes(from.next(16).try_into().unwrap());
                <$kind>::try_from(wide).expect("an integer is out of range")
            }
        }
    )* } }
    integers!(i8, i16, i32, i64, i128, isize, u8, u16, u32, u64, usize);

    macro_rules! floats { ($($kind:ty),*) => { $(
        impl Put for $kind {
            fn put(&self, out: &mut Vec<u8>) {
                out.push(b'f');
                out.extend_from_slice(&(*self as f64).to_le_bytes());
            }
        }
        impl Take for $kind {
            fn take(from: &mut Input) -> Self {
                from.expect(b'f');
                let value = f64::from_le_bytes(from.next(8).try_into().unwrap());
                if value.is_nan() {
                    panic!("NaN is no answer"); // `if (a - b).abs() > 1e-4 { panic!() }` would be passed
                }
                value as $kind
            }
        }
    )* } }
    floats!(f32, f64);

    impl Put for bool {
        fn put(&self, out: &mut Vec<u8>) {
            out.extend_from_slice(&[b'b', *self as u8]);
        }
    }
    impl Take for bool {
        fn take(from: &mut Input) -> Self {
            from.expect(b'b');
            from.next(1)[0] != 0
        }
    }
    impl Put for char {
        fn put(&self, out: &mut Vec<u8>) {
            out.push(b'c');
            out.extend_from_slice(&(*self as u32).to_le_bytes());
        }
    }
    impl Take for char {
        fn take(from: &mut Input) -> Self {
            from.expect(b'c');
            char::from_u32(u32::from_le_bytes(from.next(4).try_into().unwrap())).expect("this is not a character")
        }
    }
    impl Put for str {
        fn put(&self, out: &mut Vec<u8>) {
            out.push(b's');
            put_count(self.len(), out);
            out.extend_from_slice(self.as_bytes());
        }
    }
    impl Put for String {
        fn put(&self, out: &mut Vec<u8>) {
            self.as_str().put(out)
        }
    }
    impl Take for String {
        fn take(from: &mut Input) -> Self {
            from.expect(b's');
            let count = from.count();
            String::from_utf8(from.next(count).to_vec()).expect("this is not a text")
        }
    }
    impl Put for () {
        fn put(&self, out: &mut Vec<u8>) {
            out.push(b'u');
        }
    }
    impl Take for () {
        fn take(from: &mut Input) -> Self {
            from.expect(b'u');
        }
    }

    // What is borrowed is leaked: the process ends with the tests.
    impl Take for &'static str {
        fn take(from: &mut Input) -> Self {
            Box::leak(String::take(from).into_boxed_str())
        }
    }
    impl<T: Take + 'static> Take for &'static T {
        fn take(from: &mut Input) -> Self {
            Box::leak(Box::new(T::take(from)))
        }
    }
    impl<T: Take + 'static> Take for &'static mut T {
        fn take(from: &mut Input) -> Self {
            Box::leak(Box::new(T::take(from)))
        }
    }
    impl<T: Take + 'static> Take for &'static [T] {
        fn take(from: &mut Input) -> Self {
            Box::leak(<Vec<T>>::take(from).into_boxed_slice())
        }
    }
    impl<T: Put + ?Sized> Put for &T {
        fn put(&self, out: &mut Vec<u8>) {
            (**self).put(out)
        }
    }
    impl<T: Put + ?Sized> Put for &mut T {
        fn put(&self, out: &mut Vec<u8>) {
            (**self).put(out)
        }
    }
    impl<T: Put + ?Sized> Put for Box<T> {
        fn put(&self, out: &mut Vec<u8>) {
            (**self).put(out)
        }
    }

    macro_rules! sequences { ($($kind:ty, ($($bound:tt)*));* $(;)?) => { $(
        impl<T: Put> Put for $kind {
            fn put(&self, out: &mut Vec<u8>) {
                out.push(b'v');
                put_count(self.len(), out);
                for item in self.iter() {
                    item.put(out);
                }
            }
        }
        impl<T: Take + $($bound)*> Take for $kind {
            fn take(from: &mut Input) -> Self {
                from.expect(b'v');
                (0..from.count()).map(|_| T::take(from)).collect()
            }
        }
    )* } }
    sequences!(Vec<T>, (Sized); VecDeque<T>, (Sized); BTreeSet<T>, (Ord); HashSet<T>, (Hash + Eq));
    impl<T: Put> Put for [T] {
        fn put(&self, out: &mut Vec<u8>) {
            out.push(b'v');
            put_count(self.len(), out);
            for item in self {
                item.put(out);
            }
        }
    }
    impl<T: Put, const N: usize> Put for [T; N] {
        fn put(&self, out: &mut Vec<u8>) {
            self[..].put(out)
        }
    }
    impl<T: Take, const N: usize> Take for [T; N] {
        fn take(from: &mut Input) -> Self {
            <Vec<T>>::take(from).try_into().ok().expect("an array has another length")
        }
    }

    macro_rules! maps { ($($kind:ident, ($($bound:tt)*));*) => { $(
        impl<K: Put, V: Put> Put for $kind<K, V> {
            fn put(&self, out: &mut Vec<u8>) {
                out.push(b'v');
                put_count(self.len(), out);
                for (key, value) in self.iter() {
                    (key, value).put(out);
                }
            }
        }
        impl<K: Take + $($bound)*, V: Take> Take for $kind<K, V> {
            fn take(from: &mut Input) -> Self {
                from.expect(b'v');
                (0..from.count()).map(|_| <(K, V)>::take(from)).collect()
            }
        }
    )* } }
    maps!(HashMap, (Hash + Eq); BTreeMap, (Ord));

    macro_rules! tuples { ($(($($name:ident)*)),*) => { $(
        impl<$($name: Put),*> Put for ($($name,)*) {
            #[allow(non_snake_case)]
            fn put(&self, out: &mut Vec<u8>) {
                out.push(b't');
                let ($($name,)*) = self;
                $($name.put(out);)*
            }
        }
        impl<$($name: Take),*> Take for ($($name,)*) {
            fn take(from: &mut Input) -> Self {
                from.expect(b't');
                ($($name::take(from),)*)
            }
        }
    )* } }
    tuples!((A), (A B), (A B C), (A B C D), (A B C D E), (A B C D E F));

    impl<T: Put> Put for Option<T> {
        fn put(&self, out: &mut Vec<u8>) {
            out.push(b'o');
            out.push(self.is_some() as u8);
            if let Some(value) = self {
                value.put(out);
            }
        }
    }
    impl<T: Take> Take for Option<T> {
        fn take(from: &mut Input) -> Self {
            from.expect(b'o');
            if from.next(1)[0] != 0 { Some(T::take(from)) } else { None }
        }
    }
    impl<T: Put, E: Put> Put for Result<T, E> {
        fn put(&self, out: &mut Vec<u8>) {
            out.push(b'r');
            out.push(self.is_ok() as u8);
            match self {
                Ok(value) => value.put(out),
                Err(error) => error.put(out),
            }
        }
    }
    impl<T: Take, E: Take> Take for Result<T, E> {
        fn take(from: &mut Input) -> Self {
            from.expect(b'r');
            if from.next(1)[0] != 0 { Ok(T::take(from)) } else { Err(E::take(from)) }
        }
    }

    // `Any` of the types that tests use; of another, that there is something.
    macro_rules! any { ($($letter:literal $kind:ty),* $(,)?) => {
        impl Put for dyn Any {
            fn put(&self, out: &mut Vec<u8>) {
                $(if let Some(value) = self.downcast_ref::<$kind>() {
                    out.push($letter);
                    return value.put(out);
                })*
                out.push(b'?');
            }
        }
        impl Take for Box<dyn Any> {
            fn take(from: &mut Input) -> Self {
                match from.next(1)[0] {
                    $($letter => Box::new(<$kind>::take(from)),)*
                    _ => Box::new(Opaque),
                }
            }
        }
    } }
    struct Opaque;
    any!(
        b'1' i8, b'2' i16, b'3' i32, b'4' i64, b'5' i128, b'6' u8, b'7' u16, b'8' u32, b'9' u64, b'0' usize,
        b'f' f32, b'd' f64, b'b' bool, b'c' char, b'S' String, b's' &'static str, b'u' (), b'z' isize,
        b'V' Vec<Box<dyn Any>>, b'I' Vec<i32>, b'T' Vec<String>, b't' Vec<&'static str>, b'D' Vec<f64>,
    );
    impl Take for &'static dyn Any {
        fn take(from: &mut Input) -> Self {
            Box::leak(<Box<dyn Any>>::take(from))
        }
    }

    /// A value of a type of the problem's own, as it prints; equal to what prints the same.
    pub struct Shown<T>(String, ::std::marker::PhantomData<T>);
    impl<T> Take for Shown<T> {
        fn take(from: &mut Input) -> Self {
            Shown(String::take(from), ::std::marker::PhantomData)
        }
    }
    impl<T> fmt::Debug for Shown<T> {
        fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
            to.write_str(&self.0)
        }
    }
    impl<T: fmt::Debug> PartialEq<T> for Shown<T> {
        fn eq(&self, other: &T) -> bool {
            self.0 == ::std::format!("{:?}", other)
        }
    }

    fn send(payload: &[u8]) {
        let mut frame = (payload.len() as u64).to_le_bytes().to_vec();
        frame.extend_from_slice(payload);
        let mut file = ManuallyDrop::new(unsafe { File::from_raw_fd(OUTPUT) });
        let _ = file.write_all(&frame);
    }
    fn receive() -> Option<Input> {
        let mut file = ManuallyDrop::new(unsafe { File::from_raw_fd(INPUT) });
        let mut head = [0; 8];
        file.read_exact(&mut head).ok()?;
        let size = u64::from_le_bytes(head);
        if size > MAX_BYTES {
            panic!("a value is too large");
        }
        let mut bytes = ::std::vec![0; size as usize];
        file.read_exact(&mut bytes).ok()?;
        Some(Input { bytes, at: 0 })
    }

    /// What the tests do in the place of the solution's function.
    pub struct Call(Vec<u8>);
    impl Call {
        pub fn new(name: &str) -> Self {
            let mut request = Vec::new();
            name.put(&mut request);
            Call(request)
        }
        pub fn with<T: Put + ?Sized>(mut self, value: &T) -> Self {
            value.put(&mut self.0);
            self
        }
        pub fn send<R: Take>(self) -> R {
            send(&self.0);
            let mut answer = receive().expect("the solution ended before it answered");
            if answer.next(1)[0] == 0 {
                panic!("the solution failed");
            }
            answer.take()
        }
    }

    /// Answers calls until the tests end.
    pub fn serve(answer: fn(&str, &mut Input, &mut Vec<u8>)) {
        while let Some(mut request) = receive() {
            let done = ::std::panic::catch_unwind(move || {
                let name = String::take(&mut request);
                let mut out = ::std::vec![1u8];
                answer(&name, &mut request, &mut out);
                out
            });
            send(&done.unwrap_or(::std::vec![0]));
        }
    }

    /// The last thing the tests do.
    pub fn finish() {
        ::std::eprintln!("\n{}", ::std::env::var("SPORELOOM_NONCE").unwrap_or_default());
    }
}
