// SPDX-License-Identifier: Apache-2.0
// Calls of a C++ function in another process. Frames of a length and values, each behind a tag.
// It stands before everything else: what a solution defines does not reach it.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <exception>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace sporeloom_rpc {
const int INPUT = 3, OUTPUT = 4;
const uint64_t MAX_BYTES = 1 << 26;

struct Reader {
  std::string bytes;
  size_t at;
  void copy(void* to, size_t size) {
    if (size > bytes.size() - at) throw std::runtime_error("a value is cut off");
    memcpy(to, bytes.data() + at, size);
    at += size;
  }
  char tag() { char c; copy(&c, 1); return c; }
  uint64_t count() {
    uint64_t n;
    copy(&n, sizeof n);
    if (n > bytes.size()) throw std::runtime_error("a value is too large");
    return n;
  }
  void expect(char wanted) { if (tag() != wanted) throw std::runtime_error("a value of another type was expected"); }
};

inline void raw(std::string& out, const void* from, size_t size) { out.append(static_cast<const char*>(from), size); }
inline void count(std::string& out, uint64_t n) { raw(out, &n, sizeof n); }

template <class T, class = void> struct Wire;

template <class T> struct Wire<T, typename std::enable_if<std::is_integral<T>::value>::type> {
  static void put(std::string& out, T value) {
    bool big = value > 0 && uint64_t(value) > uint64_t(std::numeric_limits<int64_t>::max());
    out += big ? 'u' : 'i';
    uint64_t bits = uint64_t(value);
    raw(out, &bits, sizeof bits);
  }
  static T take(Reader& in) {
    char tag = in.tag();
    if (tag == 'f') {
      double d;
      in.copy(&d, sizeof d);
      if (!(d >= -9007199254740992.0 && d <= 9007199254740992.0) || double(int64_t(d)) != d) throw std::runtime_error("an integer was expected");
      return fit(int64_t(d));
    }
    uint64_t bits;
    in.copy(&bits, sizeof bits);
    if (tag == 'u') {
      if (bits > uint64_t(std::numeric_limits<T>::max())) throw std::runtime_error("an integer is out of range");
      return T(bits);
    }
    if (tag != 'i') throw std::runtime_error("an integer was expected");
    return fit(int64_t(bits));
  }
  static T fit(int64_t value) {
    T fitted = T(value);
    if (int64_t(fitted) != value || (value < 0) != (fitted < T(0))) throw std::runtime_error("an integer is out of range");
    return fitted;
  }
};

template <class T> struct Wire<T, typename std::enable_if<std::is_floating_point<T>::value>::type> {
  static void put(std::string& out, T value) { double d = double(value); out += 'f'; raw(out, &d, sizeof d); }
  static T take(Reader& in) {
    char tag = in.tag();
    if (tag == 'i') { int64_t i; in.copy(&i, sizeof i); return T(i); }
    if (tag != 'f') throw std::runtime_error("a number was expected");
    double d;
    in.copy(&d, sizeof d);
    if (d != d) throw std::runtime_error("NaN is no answer"); // `if (abs(a - b) > 1e-4) return false;` would be passed
    return T(d);
  }
};

template <> struct Wire<std::string> {
  static void put(std::string& out, const std::string& value) { out += 's'; count(out, value.size()); out += value; }
  static std::string take(Reader& in) {
    in.expect('s');
    std::string value(in.count(), 0);
    in.copy(&value[0], value.size());
    return value;
  }
};
template <> struct Wire<const char*> {
  static void put(std::string& out, const char* value) { Wire<std::string>::put(out, value); }
  static const char* take(Reader& in) { return strdup(Wire<std::string>::take(in).c_str()); }
};
template <> struct Wire<char*> : Wire<const char*> {
  static char* take(Reader& in) { return strdup(Wire<std::string>::take(in).c_str()); }
};

template <class A, class B> struct Wire<std::pair<A, B>> {
  static void put(std::string& out, const std::pair<A, B>& value) {
    out += 'p';
    Wire<A>::put(out, value.first);
    Wire<B>::put(out, value.second);
  }
  static std::pair<A, B> take(Reader& in) {
    in.expect('p');
    A first = Wire<A>::take(in);
    return std::pair<A, B>(first, Wire<B>::take(in));
  }
};

// Every other container of one type, and maps, whose elements are pairs.
template <class T> struct Element { typedef T type; };
template <class K, class V> struct Element<std::pair<const K, V>> { typedef std::pair<K, V> type; };
template <class T> struct Wire<T, typename std::enable_if<!std::is_void<typename T::value_type>::value && !std::is_void<typename T::const_iterator>::value>::type> {
  typedef typename Element<typename T::value_type>::type Item;
  static void put(std::string& out, const T& value) {
    out += 'v';
    count(out, value.size());
    for (typename T::const_iterator it = value.begin(); it != value.end(); ++it) Wire<Item>::put(out, *it);
  }
  static T take(Reader& in) {
    in.expect('v');
    T value;
    for (uint64_t n = in.count(); n > 0; n--) value.insert(value.end(), Wire<Item>::take(in));
    return value;
  }
};

#ifdef BOOST_ANY_INCLUDED
template <> struct Wire<boost::any> {
  template <class T> static bool put_as(std::string& out, const boost::any& value, char letter) {
    if (value.type() != typeid(T)) return false;
    out += letter;
    Wire<T>::put(out, boost::any_cast<T>(value));
    return true;
  }
  static void put(std::string& out, const boost::any& value) {
    out += 'a';
    if (value.empty()) { out += 'n'; return; }
    if (put_as<int>(out, value, 'i') || put_as<long>(out, value, 'l') || put_as<long long>(out, value, 'L') ||
        put_as<double>(out, value, 'd') || put_as<float>(out, value, 'f') || put_as<char>(out, value, 'c') ||
        put_as<bool>(out, value, 'b') || put_as<std::string>(out, value, 's') || put_as<const char*>(out, value, 'S'))
      return;
    throw std::runtime_error("a boost::any holds what cannot be passed on");
  }
  static boost::any take(Reader& in) {
    in.expect('a');
    switch (in.tag()) {
      case 'n': return boost::any();
      case 'i': return Wire<int>::take(in);
      case 'l': return Wire<long>::take(in);
      case 'L': return Wire<long long>::take(in);
      case 'd': return Wire<double>::take(in);
      case 'f': return Wire<float>::take(in);
      case 'c': return Wire<char>::take(in);
      case 'b': return Wire<bool>::take(in);
      case 's': return Wire<std::string>::take(in);
      case 'S': return Wire<const char*>::take(in);
      default: throw std::runtime_error("this is not a value");
    }
  }
};
#endif

template <class T> void put(std::string& out, const T& value) { Wire<typename std::decay<T>::type>::put(out, value); }
template <class T> typename std::decay<T>::type take(Reader& in) { return Wire<typename std::decay<T>::type>::take(in); }

inline bool transfer(bool is_reading, char* at, size_t size) {
  while (size > 0) {
    ssize_t n = is_reading ? read(INPUT, at, size) : write(OUTPUT, at, size);
    if (n <= 0) return false;
    at += n;
    size -= n;
  }
  return true;
}
inline void send(std::string payload) {
  uint64_t size = payload.size();
  payload.insert(0, reinterpret_cast<char*>(&size), sizeof size);
  transfer(false, &payload[0], payload.size());
}
inline bool receive(Reader& in) {
  uint64_t size;
  if (!transfer(true, reinterpret_cast<char*>(&size), sizeof size) || size > MAX_BYTES) return false;
  in.bytes.assign(size, 0);
  in.at = 0;
  return transfer(true, &in.bytes[0], size);
}

inline void put_all(std::string&) {}
template <class A, class... B> void put_all(std::string& out, const A& first, const B&... rest) {
  put(out, first);
  put_all(out, rest...);
}

// What the tests call in the place of the solution's function.
template <class R, class... A> typename std::decay<R>::type call(const char* name, const A&... values) {
  std::string request;
  put(request, std::string(name));
  put_all(request, values...);
  send(request);
  Reader in;
  try {
    if (!receive(in)) throw std::runtime_error("the solution ended before it answered");
    if (in.tag() != '+') throw std::runtime_error("the solution failed: " + Wire<std::string>::take(in));
    return take<R>(in);
  } catch (const std::exception& error) {
    fprintf(stderr, "%s\n", error.what());
    _exit(1);
  }
}

// Answers calls until the tests end.
inline int serve(void (*answer)(const std::string&, Reader&, std::string&)) {
  Reader in;
  while (receive(in)) {
    std::string out = "+";
    try {
      answer(Wire<std::string>::take(in), in, out);
    } catch (const std::exception& error) {
      out = "-";
      put(out, std::string(error.what()));
    }
    fflush(NULL);
    send(out);
  }
  return 0;
}

// The last thing the tests do.
inline void finish() {
  fprintf(stderr, "\n%s\n", getenv("SPORELOOM_NONCE"));
  fflush(NULL);
}
}  // namespace sporeloom_rpc
