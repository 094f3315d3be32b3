// SPDX-License-Identifier: Apache-2.0
// Calls of a JavaScript function in another process. Frames of a length and JSON; what JSON does not know is an array that
// begins with a tag.
const sporeloomRpc = (() => {
  const fs = require('fs')
  const { parse, stringify } = JSON
  const INPUT = 3, OUTPUT = 4, MAX_BYTES = 1 << 26

  const encode = (value) => {
    switch (typeof value) {
      case 'string': case 'boolean': return value
      case 'undefined': return ['undefined']
      case 'bigint': return ['bigint', value.toString()]
      case 'number': return Number.isFinite(value) && !Object.is(value, -0) ? value : ['number', Object.is(value, -0) ? '-0' : String(value)]
      case 'object': break
      default: throw new TypeError(`a ${typeof value} cannot be passed on`)
    }
    if (value === null) return null
    if (Array.isArray(value)) return ['array', Array.from(value, encode)]
    if (value instanceof Map) return ['map', Array.from(value, ([k, v]) => [encode(k), encode(v)])]
    if (value instanceof Set) return ['set', Array.from(value, encode)]
    if (value instanceof Date) return ['date', encode(value.getTime())]
    if (value instanceof Number || value instanceof String || value instanceof Boolean) throw new TypeError('a boxed value cannot be passed on')
    return ['object', Object.keys(value).map((key) => [key, encode(value[key])])]
  }

  const number = (value) => {
    if (Number.isNaN(value)) throw new RangeError('NaN is no answer') // `if (Math.abs(a - b) > 1e-4) throw ...` would be passed
    return value
  }

  const decode = (data) => {
    if (!Array.isArray(data)) return data
    const [kind, value] = data
    switch (kind) {
      case 'undefined': return undefined
      case 'bigint': return BigInt(value)
      case 'number': return number(Number(value))
      case 'array': return value.map(decode)
      case 'map': return new Map(value.map(([k, v]) => [decode(k), decode(v)]))
      case 'set': return new Set(value.map(decode))
      case 'date': return new Date(number(Number(decode(value))))
      case 'object': {
        const made = {}
        for (const [key, v] of value) Object.defineProperty(made, String(key), { value: decode(v), writable: true, enumerable: true, configurable: true })
        return made
      }
      default: throw new TypeError('this is not a value')
    }
  }

  const send = (data) => {
    const payload = Buffer.from(stringify(data), 'utf8')
    const head = Buffer.alloc(8)
    head.writeBigUInt64BE(BigInt(payload.length))
    const frame = Buffer.concat([head, payload])
    for (let at = 0; at < frame.length;) at += fs.writeSync(OUTPUT, frame, at)
  }

  const read = (size) => {
    const buffer = Buffer.alloc(size)
    for (let at = 0; at < size;) {
      const count = fs.readSync(INPUT, buffer, at, size - at, null)
      if (count === 0) return null
      at += count
    }
    return buffer
  }

  const receive = () => {
    const head = read(8)
    if (head === null) return null
    const size = Number(head.readBigUInt64BE())
    if (size > MAX_BYTES) throw new RangeError('a value is too large')
    const payload = read(size)
    return payload === null ? null : parse(payload.toString('utf8'))
  }

  return {
    // What the tests call in the place of the solution's function.
    function: (name) => (...values) => {
      send([name, values.map(encode)])
      const answer = receive()
      if (answer === null) throw new Error('the solution ended before it answered')
      if (answer[0] !== 'result') throw new Error(`the solution failed: ${answer[1]}`)
      return decode(answer[1])
    },
    // Answers calls until the tests end.
    serve: (functions) => {
      for (let request = receive(); request !== null; request = receive()) {
        let answer
        try {
          answer = ['result', encode(functions[request[0]](...request[1].map(decode)))]
        } catch (error) {
          console.error(error)
          answer = ['failure', String(error)]
        }
        send(answer)
      }
    },
    // The last thing the tests do.
    finish: () => fs.writeSync(2, `\n${process.env.SPORELOOM_NONCE}\n`),
  }
})()
