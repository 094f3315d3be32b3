// SPDX-License-Identifier: Apache-2.0
// Calls of a Go function in another process. Frames of a length and values, each behind the name of its type.

const (
	sporeloomInput, sporeloomOutput = 3, 4
	sporeloomMaxBytes               = 1 << 26
)

var sporeloomBasic = map[string]sporeloomReflect.Type{
	"bool": sporeloomReflect.TypeOf(false), "string": sporeloomReflect.TypeOf(""),
	"int": sporeloomReflect.TypeOf(int(0)), "int8": sporeloomReflect.TypeOf(int8(0)), "int16": sporeloomReflect.TypeOf(int16(0)),
	"int32": sporeloomReflect.TypeOf(int32(0)), "int64": sporeloomReflect.TypeOf(int64(0)),
	"uint": sporeloomReflect.TypeOf(uint(0)), "uint8": sporeloomReflect.TypeOf(uint8(0)), "uint16": sporeloomReflect.TypeOf(uint16(0)),
	"uint32": sporeloomReflect.TypeOf(uint32(0)), "uint64": sporeloomReflect.TypeOf(uint64(0)),
	"float32": sporeloomReflect.TypeOf(float32(0)), "float64": sporeloomReflect.TypeOf(float64(0)),
	"interface {}": sporeloomReflect.TypeOf((*interface{})(nil)).Elem(),
}

// The type that a name stands for, and what follows the name.
func sporeloomType(name string) (sporeloomReflect.Type, string) {
	if sporeloomStrings.HasPrefix(name, "[]") {
		element, rest := sporeloomType(name[2:])
		return sporeloomReflect.SliceOf(element), rest
	}
	if sporeloomStrings.HasPrefix(name, "map[") {
		key, rest := sporeloomType(name[4:])
		value, rest := sporeloomType(rest[1:])
		return sporeloomReflect.MapOf(key, value), rest
	}
	if sporeloomStrings.HasPrefix(name, "[") {
		end := sporeloomStrings.Index(name, "]")
		length, err := sporeloomStrconv.Atoi(name[1:end])
		if err != nil || length > 1<<20 {
			panic("this is not a type")
		}
		element, rest := sporeloomType(name[end+1:])
		return sporeloomReflect.ArrayOf(length, element), rest
	}
	end := len(name)
	if at := sporeloomStrings.Index(name, "]"); at >= 0 {
		end = at
	}
	if found, ok := sporeloomBasic[name[:end]]; ok {
		return found, name[end:]
	}
	panic("a " + name + " cannot be passed on")
}

type sporeloomWriter struct{ bytes []byte }

func (w *sporeloomWriter) number(n uint64) {
	for shift := 56; shift >= 0; shift -= 8 {
		w.bytes = append(w.bytes, byte(n>>uint(shift)))
	}
}

func (w *sporeloomWriter) text(s string) {
	w.number(uint64(len(s)))
	w.bytes = append(w.bytes, s...)
}

func (w *sporeloomWriter) put(v sporeloomReflect.Value) {
	switch v.Kind() {
	case sporeloomReflect.Bool:
		if v.Bool() {
			w.number(1)
		} else {
			w.number(0)
		}
	case sporeloomReflect.String:
		w.text(v.String())
	case sporeloomReflect.Int, sporeloomReflect.Int8, sporeloomReflect.Int16, sporeloomReflect.Int32, sporeloomReflect.Int64:
		w.number(uint64(v.Int()))
	case sporeloomReflect.Uint, sporeloomReflect.Uint8, sporeloomReflect.Uint16, sporeloomReflect.Uint32, sporeloomReflect.Uint64:
		w.number(v.Uint())
	case sporeloomReflect.Float32, sporeloomReflect.Float64:
		w.number(sporeloomMath.Float64bits(v.Float()))
	case sporeloomReflect.Interface:
		if v.IsNil() {
			w.text("")
			return
		}
		w.typed(v.Elem())
	case sporeloomReflect.Slice, sporeloomReflect.Array:
		if v.Kind() == sporeloomReflect.Slice && v.IsNil() {
			w.number(1 << 63)
			return
		}
		w.number(uint64(v.Len()))
		for i := 0; i < v.Len(); i++ {
			w.put(v.Index(i))
		}
	case sporeloomReflect.Map:
		if v.IsNil() {
			w.number(1 << 63)
			return
		}
		w.number(uint64(v.Len()))
		for _, key := range v.MapKeys() {
			w.put(key)
			w.put(v.MapIndex(key))
		}
	default:
		panic("a " + v.Type().String() + " cannot be passed on")
	}
}

func (w *sporeloomWriter) typed(v sporeloomReflect.Value) {
	if !v.IsValid() {
		w.text("")
		return
	}
	name := v.Type().String()
	if found, rest := sporeloomType(name); found != v.Type() || rest != "" {
		panic("a " + name + " cannot be passed on")
	}
	w.text(name)
	w.put(v)
}

type sporeloomReader struct {
	bytes []byte
}

func (r *sporeloomReader) next(n uint64) []byte {
	if n > uint64(len(r.bytes)) {
		panic("a value is cut off")
	}
	found := r.bytes[:n]
	r.bytes = r.bytes[n:]
	return found
}

func (r *sporeloomReader) number() uint64 {
	var n uint64
	for _, b := range r.next(8) {
		n = n<<8 | uint64(b)
	}
	return n
}

func (r *sporeloomReader) text() string { return string(r.next(r.number())) }

func (r *sporeloomReader) take(t sporeloomReflect.Type) sporeloomReflect.Value {
	v := sporeloomReflect.New(t).Elem()
	switch t.Kind() {
	case sporeloomReflect.Bool:
		v.SetBool(r.number() != 0)
	case sporeloomReflect.String:
		v.SetString(r.text())
	case sporeloomReflect.Int, sporeloomReflect.Int8, sporeloomReflect.Int16, sporeloomReflect.Int32, sporeloomReflect.Int64:
		v.SetInt(int64(r.number()))
	case sporeloomReflect.Uint, sporeloomReflect.Uint8, sporeloomReflect.Uint16, sporeloomReflect.Uint32, sporeloomReflect.Uint64:
		v.SetUint(r.number())
	case sporeloomReflect.Float32, sporeloomReflect.Float64:
		v.SetFloat(sporeloomMath.Float64frombits(r.number()))
		if sporeloomMath.IsNaN(v.Float()) {
			panic("NaN is no answer") // `if math.Abs(a-b) > 1e-4 { t.Fail() }` would be passed
		}
	case sporeloomReflect.Interface:
		if found := r.typed(); found.IsValid() {
			v.Set(found)
		}
	case sporeloomReflect.Slice, sporeloomReflect.Array, sporeloomReflect.Map:
		n := r.number()
		if n == 1<<63 {
			return v
		}
		if n > uint64(len(r.bytes)) {
			panic("a value is cut off")
		}
		if t.Kind() == sporeloomReflect.Slice {
			v.Set(sporeloomReflect.MakeSlice(t, int(n), int(n)))
		}
		if t.Kind() == sporeloomReflect.Map {
			v.Set(sporeloomReflect.MakeMap(t))
		}
		for i := 0; i < int(n); i++ {
			if t.Kind() == sporeloomReflect.Map {
				key := r.take(t.Key())
				v.SetMapIndex(key, r.take(t.Elem()))
			} else {
				v.Index(i).Set(r.take(t.Elem()))
			}
		}
	}
	return v
}

func (r *sporeloomReader) typed() sporeloomReflect.Value {
	name := r.text()
	if name == "" {
		return sporeloomReflect.Value{}
	}
	t, rest := sporeloomType(name)
	if rest != "" {
		panic("this is not a type")
	}
	return r.take(t)
}

var (
	sporeloomFrom = sporeloomOs.NewFile(sporeloomInput, "calls")
	sporeloomTo   = sporeloomOs.NewFile(sporeloomOutput, "results")
)

func sporeloomSend(payload []byte) {
	var w sporeloomWriter
	w.number(uint64(len(payload)))
	sporeloomTo.Write(append(w.bytes, payload...))
}

// The next frame; nil once the other side has gone.
func sporeloomReceive() *sporeloomReader {
	read := func(size uint64) []byte {
		buffer := make([]byte, size)
		for at := 0; at < len(buffer); {
			n, err := sporeloomFrom.Read(buffer[at:])
			if err != nil {
				return nil
			}
			at += n
		}
		return buffer
	}
	head := read(8)
	if head == nil {
		return nil
	}
	size := (&sporeloomReader{head}).number()
	if size > sporeloomMaxBytes {
		panic("a value is too large")
	}
	payload := read(size)
	if payload == nil {
		return nil
	}
	return &sporeloomReader{payload}
}

// What the tests call in the place of the solution's function: `result` points to where its result goes.
func sporeloomCall(name string, result interface{}, values ...interface{}) {
	var w sporeloomWriter
	w.text(name)
	w.number(uint64(len(values)))
	for _, value := range values {
		w.typed(sporeloomReflect.ValueOf(value))
	}
	sporeloomSend(w.bytes)
	answer := sporeloomReceive()
	if answer == nil {
		panic("the solution ended before it answered")
	}
	if answer.number() == 0 {
		panic("the solution failed: " + answer.text())
	}
	found, place := answer.typed(), sporeloomReflect.ValueOf(result).Elem()
	if !found.IsValid() {
		if place.Kind() != sporeloomReflect.Interface {
			panic("the solution gave nothing")
		}
		return
	}
	if !found.Type().AssignableTo(place.Type()) {
		panic("the solution gave a " + found.Type().String())
	}
	place.Set(found)
}

// Answers calls until the tests end.
func sporeloomServe(functions map[string]interface{}) {
	for request := sporeloomReceive(); request != nil; request = sporeloomReceive() {
		sporeloomSend(sporeloomAnswer(functions, request))
	}
}

func sporeloomAnswer(functions map[string]interface{}, request *sporeloomReader) (payload []byte) {
	defer func() {
		if reason := recover(); reason != nil {
			var w sporeloomWriter
			w.number(0)
			w.text(sporeloomFmt.Sprint(reason))
			payload = w.bytes
		}
	}()
	function := sporeloomReflect.ValueOf(functions[request.text()])
	values := make([]sporeloomReflect.Value, request.number())
	for i := range values {
		values[i] = request.typed()
		if !values[i].IsValid() {
			values[i] = sporeloomReflect.Zero(function.Type().In(i))
		}
	}
	var w sporeloomWriter
	w.number(1)
	w.typed(function.Call(values)[0])
	return w.bytes
}

// The last thing the tests do.
func sporeloomFinish() {
	sporeloomOs.Stderr.WriteString("\n" + sporeloomOs.Getenv("SPORELOOM_NONCE") + "\n")
}
